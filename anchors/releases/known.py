"""Every official vLLM release that this hotfix knows: the one place where a new one is added.

Add a line, then run `python3 -m anchors.drift.update`. Tests, benchmarks, the sandbox, documents
and recipes take theirs from here, or have it written by that command.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from anchors.errors import DONE, USAGE
from anchors.report import PREFIX

#: No image input of its own, and no drafting with DSpark.
WITHOUT_DSPARK = "text-only, without DSpark"
#: No image input of its own; everything of the hotfix holds.
WITH_DSPARK = "text-only"
#: Serves the checkpoint with images itself: the hotfix stands down.
NATIVE = "native"


@dataclass(frozen=True)
class Release:
    """`runs`: the tests also run its Python, from a wheel for CPUs, and not only patch it."""

    version: str
    kind: str
    runs: bool = False


#: The first vLLM whose FlashInfer has SM12x kernels for DSpark's rows (docs/machines.md).
DRAFTS_ON_SM12X = "0.29.0"
#: The first vLLM that serves the model itself with a FlashInfer that takes its image rows on SM12x.
NATIVE_ON_SM12X = "0.31.0"

#: Oldest first.
KNOWN = (
    Release("0.22.0", WITHOUT_DSPARK),
    Release("0.22.1", WITHOUT_DSPARK),
    Release("0.23.0", WITHOUT_DSPARK),
    Release("0.24.0", WITHOUT_DSPARK),
    Release("0.25.0", WITH_DSPARK),
    Release("0.25.1", WITH_DSPARK, runs=True),
    Release("0.26.0", WITH_DSPARK, runs=True),
    Release("0.27.0", WITH_DSPARK),
    Release("0.27.1", WITH_DSPARK, runs=True),
    Release("0.28.0", WITH_DSPARK, runs=True),
    Release("0.29.0", WITH_DSPARK, runs=True),
    Release("0.30.0", NATIVE),
    Release("0.31.0", NATIVE),
    Release("0.32.0", NATIVE, runs=True),
    Release("0.33.0", NATIVE),
)


def versions(*kinds: str) -> tuple[str, ...]:
    """The releases of these kinds, of every kind without one; oldest first."""
    return tuple(one.version for one in KNOWN if not kinds or one.kind in kinds)


def run_by_tests(*kinds: str) -> tuple[str, ...]:
    """Those of `versions` whose Python the tests run."""
    return tuple(one.version for one in KNOWN if one.runs and one.version in versions(*kinds))


def newest() -> str:
    """The newest release that the hotfix serves: what the sandbox and the tests start from."""
    return versions(WITHOUT_DSPARK, WITH_DSPARK)[-1]


def named(text: str) -> str | None:
    """The release that a person means by `v0.28.0` or `latest`; None where it is not known."""
    wanted = newest() if text == "latest" else text.removeprefix("v")
    return wanted if wanted in versions() else None


def main(text: str) -> int:
    """Prints the release for run.sh; 2 with the ones there are where it is none of them."""
    found = named(text)
    if found:
        print(found)
        return DONE
    print(
        f"{PREFIX} vLLM {text} is not a release known here. Nothing was changed.",
        f"next: --vllm with one of {', '.join(versions())}; "
        f"or judge another without a sandbox: python3 hotfix.py drift {shlex.quote(text)}",
        sep="\n",
        file=sys.stderr,
    )
    return USAGE


if __name__ == "__main__":  # run.sh asks
    raise SystemExit(main(sys.argv[1]))
