"""apply's last look at what it wrote, and its second look before it writes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from anchors.errors import NO, REFUSED, HotfixError
from anchors.verbs import apply

RECEIPT = object()
WORK: Any = SimpleNamespace(
    receipt=RECEIPT, notes=("of work",), job=SimpleNamespace(caches=("cache",))
)


@dataclass(frozen=True)
class Found:
    """Stands for an assessment."""

    state: str = "applied"
    detail: str = ""
    files: tuple[bytes, ...] = (b"1",)
    former: object = RECEIPT
    written: str = "applied"

    @property
    def plan(self) -> Any:
        files = [SimpleNamespace(path=f"f{i}.py", current=one) for i, one in enumerate(self.files)]
        target = SimpleNamespace(root="/vllm")
        return SimpleNamespace(
            state=self.written,
            digest="d" * 64,
            files=files,
            former=self.former,
            target=target,
            overlay_root="/overlay",
            detail="",
        )


@pytest.fixture(autouse=True)
def reported(monkeypatch: pytest.MonkeyPatch) -> None:
    blank = {"notes": [], "state": ""}
    monkeypatch.setattr(
        apply.assess, "as_report", lambda found, verb: {**blank, "notes": [], "state": found.state}
    )


def test_what_was_written_is_told() -> None:
    told = apply._checked(Found(), WORK, ("note",))
    assert (told["changed"], told["caches"], told["notes"]) == (True, ["cache"], ["note"])
    assert told["summary"].endswith(f"is in place (plan {'d' * 12})")


@pytest.mark.parametrize("found", [Found(state="drifted", detail="why"), Found(former=object())])
def test_a_tree_that_does_not_hold_it_is_a_no(found: Found) -> None:
    with pytest.raises(HotfixError, match="written, but now judged") as told:
        apply._checked(found, WORK, ())  # type: ignore[arg-type]
    assert (told.value.exit_code, told.value.state) == (NO, found.state)
    assert "Do not start this vLLM" in told.value.message


def test_a_journal_that_could_not_be_cleared_away_is_no_failure() -> None:
    told = apply._checked(Found(state="interrupted"), WORK, ())  # type: ignore[arg-type]
    assert told["state"] == "applied"
    assert "could not be cleared away" in told["notes"][0]
    with pytest.raises(HotfixError):
        apply._checked(Found(state="interrupted", written="pristine"), WORK, ())  # type: ignore[arg-type]


def test_a_file_that_somebody_wrote_meanwhile_is_named() -> None:
    first = Found(state="pristine", files=(b"1", b"2"))
    apply._refuse_changed(first, first)  # type: ignore[arg-type]
    with pytest.raises(HotfixError, match="f1.py was changed by somebody else") as told:
        apply._refuse_changed(first, replace(first, files=(b"1", b"3")))  # type: ignore[arg-type]
    assert told.value.exit_code == REFUSED
    # An interrupted run that was rolled back changes files too, and its state with them.
    apply._refuse_changed(first, replace(first, state="stale", files=(b"1", b"3")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "said", "reference"),
    [
        (OSError("a disk"), "the last look failed: a disk", "not-checked"),
        (KeyboardInterrupt(), "the last look failed: interrupted", "not-checked"),
        (ZeroDivisionError("ours"), "an unexpected error inside vision-exp", "unexpected-error"),
        (
            HotfixError("busy", "another run holds it", exit_code=6),
            "the last look failed: another run holds it",
            "not-checked",
        ),
        (
            HotfixError("not-as-planned", "written, but", exit_code=NO),
            "written, but",
            "not-as-planned",
        ),
    ],
)
def test_a_last_look_that_fails_says_that_all_was_written(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str, reference: str
) -> None:
    """Through the whole of the writing, whose steps are stood for."""
    looks = [Found(state="pristine"), error]

    def look(*_: Any, **__: Any) -> Any:
        found = looks.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    session = SimpleNamespace(notes=(), hold=lambda roots: None)
    monkeypatch.setattr(apply.assess, "assess", look)
    monkeypatch.setattr(apply, "_verified", lambda *_, **__: "proven")
    monkeypatch.setattr(apply.preflight, "check", lambda job: None)
    monkeypatch.setattr(apply.commit, "work_of", lambda verified: WORK)
    monkeypatch.setattr(apply.commit, "commit", lambda verified, session: WORK)
    monkeypatch.setattr(apply, "_overlay_roots", lambda found: set())
    monkeypatch.setattr(apply, "open_session", lambda *_: contextlib.nullcontext(session))
    arguments: Any = SimpleNamespace(overlay_root=None, strict=False)
    first: Any = Found(state="pristine")
    with pytest.raises(HotfixError, match=said) as told:
        apply._written(arguments, first, "proven", None)  # type: ignore[arg-type]
    assert (told.value.exit_code, told.value.reference) == (NO, reference)
    if reference != "not-as-planned":
        assert "All was written before; `python3 hotfix.py verify` says" in told.value.message
