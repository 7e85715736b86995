"""What the GPU checks assume of vLLM, against the sources of every release that they run on."""

from __future__ import annotations

import ast
import inspect

import pytest
import vllm_rig
from gpu.lib import loading, rig

WARMUP = "_warmup_ll_bf16_router_gemm"


def source(release: str, name: str) -> str:
    return (vllm_rig.tree(release) / "vllm" / name).read_text()


@pytest.mark.parametrize("release", vllm_rig.RELEASES)
def test_the_routers_warm_up_can_be_skipped(release: str) -> None:
    tree = ast.parse(source(release, "model_executor/warmup/kernel_warmup.py"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == WARMUP
    ]
    assert len(calls) == (0 if release == "0.25.1" else 1)
    for call in calls:
        inspect.signature(rig.skip_warmup).bind(
            *call.args, **{word.arg or "": None for word in call.keywords}
        )


@pytest.mark.parametrize("release", vllm_rig.RELEASES)
def test_whether_the_draft_loads_the_confidence_head(release: str) -> None:
    text = source(release, "models/deepseek_v4/nvidia/dspark.py")
    drops = "drop its weights" in text
    assert drops == (release in ("0.25.1", "0.26.0", "0.27.1"))
    assert bool(loading.unused_by_draft(text)) == drops
