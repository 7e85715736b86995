#!/usr/bin/env python3
"""Gives an installed, text-only vLLM image input for DeepSeek-V4-Flash-Vision-Exp, or says why not.

exit codes:
  0    done, already done, or not needed
  1    the answer is no (status: not applied; diff with --exit-code: not empty; verify failed)
  2    bad usage
  3    refused: the source is not what we know; nothing was changed
  4    failed while writing; rolled back
  5    the rollback failed; files listed
  6    environment: no vLLM, no LibCST, not writable; nothing was changed
  130  interrupted; rolled back
"""

from __future__ import annotations

import os
import signal
import sys


def _stop_early(number: int, frame: object) -> None:
    """Ends the process while it still imports: a module that is half there raises anything."""
    os.write(2, b"[vision-exp] interrupted before anything was begun.\n")
    os._exit(130)


# Not where a shell or nohup said that it is to be ignored.
_INTERRUPTS = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop_early)
    if _INTERRUPTS:
        signal.signal(signal.SIGINT, _stop_early)

import argparse
import io

if os.path.dirname(os.path.abspath(__file__)) not in sys.path:  # python3 -I, PYTHONSAFEPATH
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from anchors import report
from anchors.cli import next_step, output, program
from anchors.cli.parser import PROGRAMS, Parser, build_parser
from anchors.engine import fast
from anchors.engine.target import Target, discover
from anchors.errors import (
    BROKEN,
    DONE,
    ENVIRONMENT,
    INTERRUPTED,
    UNEXPECTED,
    HotfixError,
    unexpected,
)
from anchors.writing import state

# Not from typing, whose import would take a tenth of the time that a second run may take.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    from anchors.report import Report


def main(argv: list[str] | None = None) -> int:
    """Runs one verb; returns its exit code."""
    defaults = argparse.Namespace(
        root=None, overlay_root=None, json=False, quiet=False, verbose=False, color="auto", tree=""
    )
    parser = build_parser(__doc__)
    arguments = parser.parse_args(argv, defaults)
    if arguments.verb is None:
        parser.error("the following arguments are required: VERB")
    if arguments.verb in PROGRAMS:
        if (sys.argv[1:] if argv is None else argv)[0] != arguments.verb:
            # The program would not see it.
            own = Parser(prog=f"hotfix.py {arguments.verb}")
            own.error(f"options of {arguments.verb} stand after it, none before it")
        return program.run(arguments)
    options = next_step.given(arguments)
    try:
        result = _guarded(arguments)
    except HotfixError as error:
        result = _failed(arguments, error)
    except KeyboardInterrupt:
        result = _failed(arguments, _stopped(arguments))
    if result["error"]:
        result["error"]["hint"] = next_step.completed(result["error"]["hint"], options)
    result["next"] = next_step.completed(_next(result), options)
    try:
        _show(arguments, result)
        sys.stdout.flush()
    except OSError as error:
        # The reader has what it wanted (`| head`); a flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"{report.PREFIX} cannot print the answer: {error.strerror}", file=sys.stderr)
            return int(result["exit"]) or ENVIRONMENT
    return int(result["exit"])


def _next(result: Report) -> str:
    """The command after this one, "" where nothing is to be done."""
    if "manifest" in result:  # what it prints is a file for another node
        return ""
    if result["error"] and not result["next"]:
        return str(result["error"]["hint"])
    if result["verb"] not in ("apply", "status", "verify", "doctor", "bundle", "drift"):
        return ""
    return str(result["next"] or next_step.AFTER.get(result["state"], ""))


def _show(arguments: argparse.Namespace, result: Report) -> None:
    """Results to stdout, what was refused to stderr: its first line is the cause."""
    text, trace = result.pop("text", None), result.pop("trace", "")
    if arguments.json:
        output.print_json(result)
        return
    if text is not None:
        tinted = arguments.verb == "diff" and output.uses_colour(arguments.color)
        sys.stdout.write(output.diff(text) if tinted else text)
        if result["next"] and ("verdict" in result or not result["error"]):
            print(f"next: {result['next']}")
        if "verdict" in result:  # which says what is wrong
            return
    elif not arguments.quiet and not trace:
        colour = output.uses_colour(arguments.color)
        print(output.text(result, colour=colour, verbose=arguments.verbose))
        if result.get("summary"):
            print(f"=====> {result['summary']}")
        if result["next"] and not result["error"]:
            print(f"next: {result['next']}")
    if result["exit"] != DONE and result["error"]:
        sys.stdout.flush()
        words = output.failure(result["error"], verbose=arguments.verbose)
        ours = result["error"]["reference"] == UNEXPECTED  # its traceback is in the words
        brief = arguments.quiet and not ours
        print(words.partition("\n")[0] if brief else words, file=sys.stderr)
        if arguments.verbose and trace and not ours:
            print(trace, file=sys.stderr)


def _guarded(arguments: argparse.Namespace) -> Report:
    """`_run`, whose every failure is a HotfixError with what holds for the tree now."""
    try:
        return _run(arguments)
    except HotfixError as error:
        if error.exit_code == ENVIRONMENT and _was_interrupted(error):
            raise KeyboardInterrupt from error
        raise
    except OSError as error:
        raise _unforeseen(error, *_consequence(arguments)) from error
    except Exception as error:
        if _was_interrupted(error):
            raise KeyboardInterrupt from error
        consequence, code = _consequence(arguments)
        raise unexpected(error, consequence, exit_code=code) from error


def _run(arguments: argparse.Namespace) -> Report:
    """Calls the verb's module. The shipped overlay is read here, once, and handed on."""
    if arguments.verb in ("list", "explain"):
        from anchors.verbs import explain

        return explain.run(arguments)
    if arguments.verb == "drift":
        from anchors.drift import command as drift

        return drift.run(arguments)
    if arguments.verb == "bundle":
        from anchors.verbs import bundle

        return bundle.run(arguments)
    try:
        target = discover(arguments.root)
    except HotfixError:
        alone = arguments.verb == "doctor" and arguments.log and not arguments.root
        if not alone or arguments.manifest or arguments.against:
            raise
        from anchors.doctor import command as doctor

        return doctor.run_log(arguments)
    arguments.tree = target.root
    arguments.overlay_root = fast.requested_root(arguments.overlay_root)
    if arguments.verb == "revert":
        from anchors.verbs import revert

        return revert.run(arguments, target)
    shipped = fast.read_shipped()
    if arguments.verb in ("apply", "status"):
        known = _from_receipt(arguments, target, shipped)
        if known:
            return known
    if arguments.verb == "doctor":
        from anchors.doctor import command as doctor

        return doctor.run(arguments, target, shipped)
    if arguments.verb == "apply":
        from anchors.verbs import apply

        return apply.run(arguments, target, shipped)
    from anchors.verbs import inspect

    try:
        return inspect.run(arguments, target, shipped)
    except HotfixError as error:
        # Only an import shows what --import asks for; the receipt cannot stand in for it.
        recorded = arguments.verb == "verify" and not arguments.imports
        known = _from_receipt(arguments, target, shipped) if recorded else None
        if error.reference != "no-libcst" or known is None:
            raise
        known["notes"] = [*known["notes"], "LibCST is missing: compared with the receipt only"]
        return known


def _from_receipt(
    arguments: argparse.Namespace, target: Target, shipped: dict[str, bytes]
) -> Report | None:
    """The answer where the receipt still holds: no parsing, no writing."""
    known = fast.applied(target.root, arguments.overlay_root, shipped)
    if known is None or getattr(arguments, "strict", False):
        return None
    result = report.blank()
    result.update({name: known[name] for name in ("plan", "files", "notes", "overlay")})
    result.update(verb=arguments.verb, state="applied")
    result["vllm"] = {"root": target.root, "version": target.version}
    if arguments.verb == "apply":
        result["summary"] = f"already in place (plan {known['plan'][:12]}); nothing was written"
    return result


def _failed(arguments: argparse.Namespace, error: HotfixError) -> Report:
    import traceback

    failed = error.report or report.blank()
    failed.update(verb=arguments.verb, error=error.as_json(), exit=error.exit_code)
    failed["state"] = failed["state"] or error.state
    failed["vllm"]["root"] = failed["vllm"]["root"] or arguments.root
    failed["trace"] = traceback.format_exc()
    return failed


def _consequence(arguments: argparse.Namespace) -> tuple[str, int]:
    """What is true of the tree after a failure nobody foresaw, and its exit code.

    Writing has its own words (exit 4 and 5), so all that can be open is an earlier run's work.
    """
    if arguments.tree and state.is_interrupted(arguments.tree):
        return "A run was interrupted: the next apply or revert rolls it back first.", BROKEN
    return "Nothing was changed.", ENVIRONMENT


def _unforeseen(error: OSError, consequence: str, code: int) -> HotfixError:
    """Reading failed in a place where no kinder words are at hand."""
    return HotfixError(
        "io-error",
        f"{error.filename or 'a file'} cannot be used: {error.strerror or error}. {consequence}",
        exit_code=code,
        hint="remove the cause, then run this again (-v shows where)",
    )


def _stopped(arguments: argparse.Namespace) -> HotfixError:
    return HotfixError(
        "interrupted",
        "interrupted before anything was written.",
        exit_code=INTERRUPTED,
        hint=f"python3 hotfix.py {arguments.verb}",
    )


def _tolerant(stream: TextIO | None) -> TextIO:
    """A stream that takes every path's name, and one that is closed takes everything."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether this came of an interrupt: compiled modules that are imported make others of it."""
    seen: list[BaseException] = []
    while error and error not in seen:  # a cause may have come of what it caused
        seen.append(error)
        error = error.__cause__ or error.__context__
    return any(isinstance(each, KeyboardInterrupt) for each in seen)


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    if _INTERRUPTS:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = map(_tolerant, (sys.stdout, sys.stderr))
    raise SystemExit(main())
