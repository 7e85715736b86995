"""Verbs that are programs of `vision_exp`: run from this folder, with their own arguments."""

from __future__ import annotations

import sys

from anchors.errors import DONE, ENVIRONMENT, INTERRUPTED
from anchors.report import PREFIX

# Not from typing, whose import would take a tenth of the time that a second run may take.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def run(arguments: argparse.Namespace) -> int:
    """What `python3 -m vision_exp.VERB` does from this folder; ends as that does."""
    import runpy

    sys.argv[1:] = arguments.arguments
    if sys.__stdout__ is None:  # closed, which the program has to know
        sys.stdout = None  # type: ignore[assignment]
    try:
        runpy.run_module(f"vision_exp.{arguments.verb}", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        print(f"{PREFIX} interrupted.", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0].replace("PIL", "pillow")
        print(
            f"{PREFIX} the package {package} is missing. Nothing was done.\n"
            f"next: python3 -m pip install {package}   (or use the Python that runs vLLM)",
            file=sys.stderr,
        )
        return ENVIRONMENT
    return DONE
