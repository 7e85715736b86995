"""What sparse prefix-cache retention hits of prompts with an image, and what keeping that costs.

    python bench/retention.py [RELEASE] [--step TOKENS] [--draft]

Runs a release's own scheduler and KV cache manager on the CPU. A prompt has an image of 368 tokens
at every TOKENS-th offset (1 by default: every offset of two alignment units) and ends 1, 10 or 200
tokens after it. Each is sent again, and goes on with its answer and 60 tokens more. Compared: dense
retention, sparse retention (interval 0, the default from 0.29 on) with the overlay's boundaries,
and sparse retention without them. Wanted: no prompt for which sparse hits less than dense.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
RELEASE = "0.29.0"
OFFSETS, TAILS = 512, (1, 10, 200)
KINDS = ("dense", "sparse", "without")
LAYERS = 43  # of the released checkpoint; each has a sliding window


def child(step: int, draft: bool) -> None:
    """In the release: one JSON line."""
    import checks_retention as retention
    import torch
    from rig_scheduling import WINDOW
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    from vision_exp.engine import hooks
    from vision_exp.engine.retention import ImageRetention

    hooks.install()
    offsets = range(0, OFFSETS, step)
    rows = retention.compare(offsets, TAILS, draft=draft)
    stock = ImageRetention.install
    ImageRetention.install = lambda *_: None  # type: ignore[method-assign]
    for row, without in zip(rows, retention.compare(offsets, TAILS, draft=draft), strict=True):
        row["without"] = without["sparse"]
    ImageRetention.install = stock  # type: ignore[method-assign]
    block = SlidingWindowMLASpec(
        block_size=64,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        sliding_window=WINDOW,
        cache_dtype_str="fp8_ds_mla",
        model_version="deepseek_v4",
    )
    print(json.dumps({"rows": rows, "block_bytes": block.page_size_bytes * LAYERS}))


def main(release: str, step: int, draft: bool) -> int:
    sys.path[:0] = [str(REPO), str(REPO / "tests"), str(REPO / "tests" / "support")]
    import reporting
    import vllm_rig

    arguments = ["--child", "--step", str(step), *(["--draft"] if draft else [])]
    tree = vllm_rig.tree(release)
    done = vllm_rig.run_child(Path(__file__), tree, *arguments, timeout=3600)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        return done.returncode
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    rows, block = found["rows"], found["block_bytes"]
    print(f"{reporting.machine()}, vLLM {release}, {len(rows)} prompts, draft group: {draft}")
    print(f"{'':24}{'dense':>10}{'sparse':>10}{'without':>10}")
    for what, title in (("repeat", "tokens hit, repeat"), ("next turn", "tokens hit, next turn")):
        means = [statistics.mean(row[kind][what] for row in rows) for kind in KINDS]
        print(f"{title:24}" + "".join(f"{mean:10.0f}" for mean in means))
    blocks = [statistics.mean(row[kind]["blocks"] for row in rows) for kind in KINDS]
    print(f"{'window blocks left':24}" + "".join(f"{mean:10.2f}" for mean in blocks))
    print(f"{'MiB left':24}" + "".join(f"{mean * block / 2**20:10.2f}" for mean in blocks))
    worse = [r for r in rows for w in ("repeat", "next turn") if r["sparse"][w] < r["dense"][w]]
    print(f"sparse hits less than dense: {len(worse)} (at most 0)")
    for row in worse[:10]:
        print(json.dumps(row))
    return 1 if worse else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", nargs="?", default=RELEASE)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.step, given.draft)
    else:
        raise SystemExit(main(given.release, given.step, given.draft))
