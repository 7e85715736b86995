"""One family of errors: a reference to search for, cause and consequence, context, next command."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DONE = 0
NO = 1
USAGE = 2
REFUSED = 3
ROLLED_BACK = 4
BROKEN = 5
ENVIRONMENT = 6
INTERRUPTED = 130
UNEXPECTED = "unexpected-error"


class HotfixError(Exception):
    """A run that ends without doing what was asked.

    `reference` is kebab-case and stable; the first line of `message` names cause and
    consequence; `context` holds further lines; `hint` is the next command; `exit_code`
    is one of the constants above; `state` is the tree's state where it is known; `report` is
    the `--json` object of a tree that was assessed and then refused.
    """

    def __init__(
        self,
        reference: str,
        message: str,
        *,
        exit_code: int,
        context: tuple[str, ...] = (),
        hint: str = "",
        state: str = "",
        report: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.reference = reference
        self.message = message
        self.context = context
        self.hint = hint
        self.exit_code = exit_code
        self.state = state
        self.report = report

    def as_json(self) -> dict[str, object]:
        """The `error` object of `--json`."""
        return {
            "reference": self.reference,
            "message": self.message,
            "context": list(self.context),
            "hint": self.hint,
        }


def refused(reference: str, message: str, *context: str, hint: str, state: str = "") -> HotfixError:
    """The source is not what we know; nothing was changed (exit 3)."""
    return HotfixError(
        reference, message, exit_code=REFUSED, context=context, hint=hint, state=state
    )


def environment(
    reference: str, message: str, *context: str, hint: str, state: str = ""
) -> HotfixError:
    """The environment does not allow the job; nothing was changed (exit 6)."""
    return HotfixError(
        reference, message, exit_code=ENVIRONMENT, context=context, hint=hint, state=state
    )


def unexpected(error: BaseException, consequence: str, *, exit_code: int) -> HotfixError:
    """An error of this tool itself; its traceback is the context, to be reported."""
    # A second run may not pay for this import, which only a fault of our own needs.
    import traceback

    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    words = " ".join(str(error).split()) or "no message"
    return HotfixError(
        UNEXPECTED,
        f"an unexpected error inside vision-exp: {type(error).__name__}: {words[:300]}. "
        f"{consequence}",
        exit_code=exit_code,
        context=tuple(trace.splitlines()),
        hint="report all of this, with what `python3 hotfix.py doctor` prints",
    )
