"""Checks a running server's image input from outside.

    python3 -m vision_exp.validate --url http://localhost:8000/v1 [--json FILE]

For any OpenAI-compatible chat server. Every check says what it compared; what was not checked is
never called right. Checks of content are skipped on a model that answers no sense (random weights),
checks that compare answers where a server's own repeats differ so much that a wrong answer could
not be told from a right one. Both are said to be.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from vision_exp import validate_usage as usage
from vision_exp.validate_usage import COMMAND, EXAMPLE, Options, Stop

if TYPE_CHECKING:
    from vision_exp.validate_checks import Lab


def main(argv: list[str] | None = None) -> int:
    """Runs every check; returns the exit code (`validate_usage.EXIT_CODES`)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # answers may hold what a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(usage.options(argv, __doc__.partition("\n\n    ")[0]))
    except Stop as stop:
        stop.show()
        return stop.code
    except KeyboardInterrupt:
        Stop(0, "interrupted; no result was written.", COMMAND).show()
        return usage.INTERRUPTED
    except BrokenPipeError:
        # The reader has what it wanted (`| head`); a flush at exit must not complain.
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
    try:
        from vision_exp import validate_run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "PIL":
            raise
        hint = "python3 -m pip install pillow   (or use the Python that runs vLLM)"
        raise Stop(usage.ENVIRONMENT, "Pillow is missing. Nothing was checked.", hint) from error
    lab = validate_run.enter(options)
    results = [validate_run.run(name, check, lab) for name, check in validate_run.CHECKS.items()]
    states = [result["state"] for result in results]
    counts = {state: states.count(state) for state in ("passed", "failed", "skipped")}
    words = ", ".join(f"{count} {state}" for state, count in counts.items())
    print(words + ("; of what was skipped nothing is known" if counts["skipped"] else ""))
    if options.json:
        found = _server(options, lab) | counts | {"checks": results}
        try:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise Stop(
                usage.NOT_WRITTEN,
                f"--json {options.json} cannot be written: {error.strerror}. The result is above.",
                f"{COMMAND} --url {EXAMPLE} --json FILE",
            ) from error
    return usage.A_CHECK_FAILED if counts["failed"] else usage.FINE


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
    sys.exit(main())
