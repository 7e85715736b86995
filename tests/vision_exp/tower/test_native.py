"""Tower and aligner against native vLLM's code with the same weights, and over several ranks.

One child process on real vLLM does it all; see in_vllm/child_native.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import native_tower
import pytest
import vllm_rig

pytestmark = pytest.mark.xdist_group(f"vllm-{vllm_rig.RELEASES[-1]}")
CHILD = Path(__file__).parent / "in_vllm" / "child_native.py"


@pytest.fixture(scope="module")
def result():
    native = vllm_rig.tree(vllm_rig.NATIVE) / native_tower.PATH
    done = vllm_rig.run_child(CHILD, vllm_rig.tree(vllm_rig.RELEASES[-1]), str(native))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_the_cases_that_were_compared(result):
    cases = {(case["layers"], tuple(case["grid"])) for case in result["compared"]}
    assert cases == {
        *((1, grid) for grid in [(7, 10), (9, 6), (1, 4), (5, 1), (14, 11)]),
        (32, (2, 4)),
    }
    assert len(result["compared"]) == 3 * len(cases)
    for case in result["compared"]:
        assert len(case["errors"]) == case["layers"] + 3  # patch_embed, blocks, norm, aligner
        assert case["norm_of_output"] > 1


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("float32", 1e-5),
        # Measured equal in every bit, but for the aligner: native multiplies a transposed matrix.
        ("bfloat16", 1e-2),
        ("bfloat16, float32 norm weights", 1e-2),
    ],
)
def test_every_stage_equals_native(result, kind, bound):
    compared = [case for case in result["compared"] if case["kind"] == kind]
    assert compared
    for case in compared:
        assert case["same_angles"]
        assert max(case["errors"].values()) <= bound, case


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_tower(result, ranks):
    assert len(result["ranks"][str(ranks)]) == ranks
    for found in (rank["shared"] for rank in result["ranks"][str(ranks)]):
        assert found["names"]
        assert found["wqkv"] == [3 * 256 // ranks, 256]
        assert found["w1"] == [2 * 192 // ranks, 256]
        assert found["tower"] < 1e-5
        assert found["aligner"] < 1e-5
        assert found["encoded"] < 1e-5
        assert found["graphs"] == (ranks == 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_hold_all_of_it_when_asked_or_when_heads_do_not_divide(result, ranks):
    """And then they share out the images, and each may have CUDA graphs."""
    assert len(result["ranks"][str(ranks)]) == ranks
    for rank in result["ranks"][str(ranks)]:
        found = rank["whole"]
        assert found["wqkv"] == [3 * 256, 256]
        assert found["parameters"] >= rank["shared"]["parameters"]
        assert (found["parameters"] > rank["shared"]["parameters"]) == (ranks > 1)
        assert found["tower"] < 1e-5
        assert found["aligner"] < 1e-5
        assert found["encoded"] < 1e-5
        assert found["graphs"]
        assert rank["ranks sharing one head"] == 1
