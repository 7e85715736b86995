"""500 random sequences of requests, 100 on each release: `python bench/sequences.py`.

Good, bad, cancelled, counting, streaming, cached and failing requests with few images and caches
with room for fewer still, on a real server (tests/vision_exp/engine/in_vllm/sequences.py). After
each sequence every image is answered as by a fresh server, both caches agree and nothing is left.
Exit code 1 unless all pass. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from reporting import machine  # noqa: E402
from vllm_rig import RELEASES, run_child, tree  # noqa: E402

CHILD = ROOT / "tests" / "vision_exp" / "engine" / "in_vllm" / "child_sequences.py"
KINDS = {"lru": 0.5, "shm": 0.3, "none": 0.1, "several": 0.05, "ranks": 0.05}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="sequences on each release")
    parser.add_argument("releases", nargs="*", default=RELEASES)
    options = parser.parse_args()
    counts = {kind: max(1, round(share * options.count)) for kind, share in KINDS.items()}
    arguments = [f"{kind}={count}" for kind, count in counts.items()]
    failed = 0
    for release in options.releases:
        start = time.monotonic()
        done = run_child(CHILD, tree(release), *arguments, "offline=1", timeout=3600)
        seconds = time.monotonic() - start
        if done.returncode:
            print(f"{release}: ended with {done.returncode}\n{done.stderr[-2000:]}")
            failed += 1
            continue
        results = json.loads(done.stdout.splitlines()[-1])["results"]
        errors = {kind: error for kind, error in results.items() if error is not None}
        passed = sum(count for kind, count in counts.items() if kind not in errors)
        print(
            f"{release}: {passed} of {sum(counts.values())} sequences, {seconds:.0f} s", flush=True
        )
        for kind, error in errors.items():
            print(f"{kind}\n{error}")
        failed += len(errors)
    print(f"wanted: all of them; {machine()}" + ("   MISSED" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
