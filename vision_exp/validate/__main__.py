"""Runs every check against a server, prints what each found, and ends with an exit code."""

import io
import os
import signal
import sys
import traceback

from vision_exp.validate import command
from vision_exp.validate.command import Stop


def main(argv: list[str] | None = None) -> int:
    """Runs every check; returns the exit code, as `command` has them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # answers may hold what a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    again = f"{command.COMMAND} {command.EXAMPLE}"
    try:
        options = command.parse(argv)
        again = options.again()
        command.write(options)
        from vision_exp.validate import run

        return run.everything(options)
    except Stop as stop:
        end = stop
    except KeyboardInterrupt:
        end = Stop(command.INTERRUPTED, "interrupted; no result was written.", again)
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0].replace("PIL", "pillow")
        hint = f"python3 -m pip install {name}   (or use the Python that runs vLLM)"
        words = f"the package {name} is missing. Nothing was checked."
        end = Stop(command.ENVIRONMENT, words, hint)
    except Exception as error:
        traceback.print_exc()
        words = f"an error inside this tool: {error!r}. No result was written."
        end = Stop(command.UNEXPECTED, words, "tell us the lines above")
        raise SystemExit(end.show(again)) from error
    return end.show(again)


def _interrupt(number: int, frame: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # another must not cut short what is said at last
    raise KeyboardInterrupt


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # All is flushed; no thread is waited for, and no interrupt adds a traceback.
    os._exit(main())
