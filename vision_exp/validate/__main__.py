"""Runs every check against a server, prints what each found, and ends with an exit code."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import traceback
from typing import Any

from vision_exp.validate import output, usage
from vision_exp.validate.output import Stop, say


def main(argv: list[str] | None = None) -> int:
    """Runs every check; returns the exit code, as `usage` has them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # answers may hold what a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    again = f"{usage.COMMAND} {usage.EXAMPLE}"
    try:
        options = usage.parse(argv)
        again = options.again()
        return _run(options)
    except Stop as stop:
        return stop.show()
    except KeyboardInterrupt:
        return Stop(output.INTERRUPTED, "interrupted; no result was written.", again).show()
    except output.NotPrinted as error:
        words = f"standard output takes nothing: {error}. No result was written."
        hint = f"{again} >FILE   (where there is space)"
        return Stop(output.NOT_WRITTEN, words, hint).show()
    except Exception as error:
        traceback.print_exc()
        words = f"an error inside this tool: {type(error).__name__}: {error}."
        hint = "tell us the lines above"
        Stop(output.UNEXPECTED, f"{words} No result was written.", hint).show()
        raise SystemExit(output.UNEXPECTED) from error


def _run(options: usage.Options) -> int:
    other = options.again(json=None)
    if options.json:
        output.prepare(options.json, other)
    if sys.stdout is None:
        words = "standard output is closed, so no result can be printed. Nothing was checked."
        raise Stop(output.NOT_WRITTEN, words, f"{options.again()} >FILE")
    try:
        from vision_exp.validate import run
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0].replace("PIL", "pillow")
        if name in ("", "vision_exp"):
            raise
        hint = f"python3 -m pip install {name}   (or use the Python that runs vLLM)"
        words = f"the package {name} is missing. Nothing was checked."
        raise Stop(output.ENVIRONMENT, words, hint) from error
    results: list[dict[str, Any]] = []
    try:
        server = asyncio.run(run.everything(options, results))
    except KeyboardInterrupt:
        left = len(run.CHECKS) - len(results)
        say(f"{_tally(results)[1]}; interrupted: of {left} checks nothing is known")
        raise
    counts, words = _tally(results)
    say(words + ("; of what was skipped nothing is known" if counts["skipped"] else ""))
    if options.json:
        found = {"schema": 1, "url": options.url} | server | counts | {"checks": results}
        output.write(options.json, f"{other} --json FILE", found)
    return output.A_CHECK_FAILED if counts["failed"] else output.FINE


def _tally(results: list[dict[str, Any]]) -> tuple[dict[str, int], str]:
    states = [result["state"] for result in results]
    counts = {state: states.count(state) for state in ("passed", "failed", "skipped")}
    return counts, ", ".join(f"{count} {state}" for state, count in counts.items())


def _interrupt(number: int, frame: object) -> None:
    # One is enough; another must not cut short what is said at the end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # All is flushed; no thread is waited for, and no interrupt adds a traceback.
    os._exit(main())
