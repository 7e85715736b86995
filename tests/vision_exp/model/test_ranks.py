"""Two processes over gloo: other digests are an error on both ranks, equal ones are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vision_exp.model import ranks

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
from datetime import timedelta
import torch.distributed as dist
from vision_exp.model import ranks

rank, overlay, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(
    "gloo", init_method="file://" + store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
try:
    ranks.compare(ranks.gather((overlay, "plan"), dist.group.WORLD, 2))
    print("same")
except ranks.RankMismatchError as error:
    print("refused", error)
finally:
    dist.destroy_process_group()  # else gloo's threads may abort the process at its exit
"""


def _both(folder: Path, one: str, two: str) -> list[str]:
    commands = [
        [sys.executable, "-c", SCRIPT, str(rank), overlay, str(folder / "store")]
        for rank, overlay in enumerate((one, two))
    ]
    running = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    try:
        return [process.communicate(timeout=100)[0] for process in running]
    finally:
        for process in running:
            process.kill()


def test_equal_overlays_pass(tmp_path: Path) -> None:
    said = _both(tmp_path, "aaaa", "aaaa")
    assert all(words.strip().endswith("same") for words in said), said


def test_different_overlays_stop_both_ranks_and_are_named(tmp_path: Path) -> None:
    for words in _both(tmp_path, "aaaa", "bbbb"):
        assert "refused" in words and "overlay aaaa" in words and "overlay bbbb" in words


def test_a_different_plan_is_refused_too() -> None:
    ranks.compare([("a", "p"), ("a", "p")])
    with pytest.raises(ranks.RankMismatchError, match="rank 1: overlay a, plan q"):
        ranks.compare([("a", "p"), ("a", "q")])
