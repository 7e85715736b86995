"""Runs every check against a server, prints what each found, and ends with an exit code."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

from vision_exp import validate
from vision_exp.validate import output, usage
from vision_exp.validate.text import NotPrinted, say
from vision_exp.validate.usage import COMMAND, EXAMPLE, Options, Stop

if TYPE_CHECKING:
    from vision_exp.validate.checks import Lab


def main(argv: list[str] | None = None) -> int:
    """Runs every check; returns the exit code (`usage.EXIT_CODES`)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # answers may hold what a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    again = f"{COMMAND} --url {EXAMPLE}"
    try:
        options = usage.options(argv, (validate.__doc__ or "").partition("\n\n    ")[0])
        again = options.again
        return _run(options)
    except Stop as stop:
        stop.show()
        return stop.code
    except KeyboardInterrupt:
        Stop(0, "interrupted; no result was written.", again).show()
        return usage.INTERRUPTED
    except NotPrinted as error:
        if not isinstance(error.__cause__, BrokenPipeError):  # `| head` has what it wanted
            words = f"standard output takes nothing: {error}. No result was written."
            Stop(0, words, f"{again} >FILE   (where there is space)").show()
        # What could not be printed is still kept; a flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return usage.NOT_WRITTEN
    except Exception as error:
        traceback.print_exc()
        words = (
            f"an error inside this tool: {type(error).__name__}: {error}. No result was written."
        )
        Stop(0, words, "tell us the lines above").show()
        raise SystemExit(usage.UNEXPECTED) from error


def _run(options: Options) -> int:
    output.remove_old(options)
    if sys.stdout is None:
        words = "standard output is closed, so no result can be printed. Nothing was checked."
        raise Stop(usage.NOT_WRITTEN, words, f"{options.again} >FILE")
    try:
        from vision_exp.validate import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "PIL":
            raise
        hint = "python3 -m pip install pillow   (or use the Python that runs vLLM)"
        raise Stop(usage.ENVIRONMENT, "Pillow is missing. Nothing was checked.", hint) from error
    lab = run.enter(options)
    results: list[dict[str, Any]] = []
    try:
        for name, check in run.CHECKS.items():
            results.append(run.run(name, check, lab))
    except KeyboardInterrupt:
        left = len(run.CHECKS) - len(results)
        say(f"{_words(_counts(results))}; interrupted: of {left} checks nothing is known")
        raise
    counts = _counts(results)
    say(_words(counts) + ("; of what was skipped nothing is known" if counts["skipped"] else ""))
    output.write(options, _server(options, lab) | counts | {"checks": results})
    return usage.A_CHECK_FAILED if counts["failed"] else usage.FINE


def _counts(results: list[dict[str, Any]]) -> dict[str, int]:
    states = [result["state"] for result in results]
    return {state: states.count(state) for state in ("passed", "failed", "skipped")}


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _server(options: Options, lab: Lab) -> dict[str, Any]:
    noise = dataclasses.asdict(lab.noise)
    return {
        "schema": 1,
        "url": options.url,
        "model": lab.client.model,
        "trained": lab.trained,
        "noise_nats": None if lab.noise.lost else lab.noise.moved,
        "noise": noise,
    }


if __name__ == "__main__":
    code = main()
    # Its result is out: one more Ctrl-C must not add a traceback of the interpreter's own end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
