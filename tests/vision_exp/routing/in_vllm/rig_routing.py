"""MoE layers of the running vLLM release on a CPU, with routing wired and every call recorded.

The experts' kernels and vLLM's compiled router cannot run on a CPU: both are replaced, the router
by a plain one that is written here from the published rule alone.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cpu_experts
import rocm_stand_in
import tiny_config
import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router

from vision_exp.engine import context
from vision_exp.engine import hooks as engine_hooks
from vision_exp.model import hooks as model_hooks
from vision_exp.routing import hooks, select

EXPERTS, TOP_K, HIDDEN, SCALE = 256, 6, 128, 1.5
IMAGE_IDS = (129257, 129258, 129259, 129260, 129261)


class Stream:
    """Stands for a CUDA stream or event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def plain_route(logits, bias, token_ids=None, table=None):
    """Text routing by the published rule, float64: (weights, ids)."""
    scores = torch.log1p(torch.exp(logits.double())).sqrt()
    if table is not None:
        ids = table[token_ids.long()].long()
    else:
        ids = torch.topk(scores + bias.double(), TOP_K).indices
    chosen = scores.gather(1, ids)
    return (chosen / chosen.sum(1, keepdim=True) * SCALE).float(), ids


class Rig:
    """Layers and what ran in them: `stock` calls of vLLM's router, `routed` (weights, ids)."""

    def __init__(self) -> None:
        torch.cuda.Stream = torch.cuda.Event = Stream  # type: ignore[misc,assignment]
        cpu_experts.select_outside()
        folder = tiny_config.write(
            Path(tempfile.mkdtemp()),
            n_routed_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            hidden_size=HIDDEN,
        )
        self.config = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, enforce_eager=True
        ).create_engine_config()
        import vllm.models.deepseek_v4.nvidia.dspark as dspark
        import vllm.models.deepseek_v4.nvidia.model as model
        import vllm.models.deepseek_v4.nvidia.mtp as mtp

        self.model, self.mtp, self.dspark = model, mtp, dspark
        engine_hooks.install()
        hooks.install()
        hooks.install_model(vars(model))
        hooks.install_draft("dspark", vars(dspark))
        hooks.install_draft("mtp", vars(mtp))
        model_hooks.install_draft("mtp", vars(mtp))
        with set_current_vllm_config(self.config):
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
            initialize_model_parallel(1, 1)
        self.made = 0
        self.stock: list[dict[str, Any]] = []
        self.routed: list[tuple[torch.Tensor, torch.Tensor]] = []
        fused_topk_bias_router.vllm_topk_softplus_sqrt = self._stock_router

    def _stock_router(
        self, weights, ids, unused, logits, renormalize, bias, tokens, table, scale
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (renormalize, scale) != (True, SCALE):
            raise AssertionError(f"renormalize={renormalize} scale={scale}")
        self.stock.append({"rows": logits.shape[0], "hash": table is not None})
        found = plain_route(logits, bias, tokens, table)
        return found[0], found[1].to(ids.dtype)

    def moe(self, layer: int, *, mega: bool = False, text: bool = False) -> Any:
        """A real DeepseekV4MoE with random gate, biases and table, and experts that record."""
        config = self.text_config() if text else self.config
        self.made += 1
        prefix = "m" * self.made  # layer names must differ, and hold one number
        with set_current_vllm_config(config), self._mega(config) if mega else _nothing():
            moe = self.model.DeepseekV4MoE(config, prefix=f"{prefix}.layers.{layer}.ffn")
        torch.manual_seed(layer)
        gate = moe.gate
        gate.cpu_linear = torch.nn.functional.linear  # made after loading, by vLLM on a CPU
        gate.weight.data = torch.randn(EXPERTS, HIDDEN, dtype=gate.weight.dtype) / 4
        for bias in (gate.e_score_correction_bias, getattr(gate, select.BIAS_VL, None)):
            if bias is not None:
                bias.data = torch.randn(EXPERTS)
        if not mega:
            self.record(moe)
        return moe

    def record(self, moe: Any) -> None:
        """Replace the fused experts' kernel of `moe` by one that records its experts."""

        def forward_modular(x, topk_weights, topk_ids, *args, **kwargs):
            self.routed.append((topk_weights, topk_ids))
            return torch.zeros_like(x)

        runner = moe.experts
        runner.routed_experts.forward_modular = forward_modular
        runner.routed_experts._ensure_moe_quant_config_init = lambda: None
        runner.routed_experts.quant_method = QuantMethod()
        runner._maybe_apply_shared_experts = lambda *args, **kwargs: None
        runner._shared_experts = None
        moe.shared_experts = None

    @contextlib.contextmanager
    def on_rocm(self) -> Iterator[None]:
        """amd/ in the place of nvidia/, with routing wired, on what says that it is ROCm."""
        self.moe(3)  # imports the experts' modules, which are to go on finding a CPU
        amd = rocm_stand_in.modules()
        stock = self.model, self.mtp, self.dspark
        self.model, self.mtp, self.dspark = amd["model"], amd["mtp"], amd.get("dspark")
        hooks.install_model(vars(self.model))
        hooks.install_draft("mtp", vars(self.mtp))
        model_hooks.install_draft("mtp", vars(self.mtp))
        try:
            with rocm_stand_in.platform():
                yield
        finally:
            self.model, self.mtp, self.dspark = stock

    def text_config(self) -> Any:
        config = copy.copy(self.config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.hf_config = copy.copy(config.model_config.hf_config)
        config.model_config.hf_config.vision_n_layers = 0
        return config

    @contextlib.contextmanager
    def _mega(self, config: Any) -> Iterator[None]:
        def init_experts(moe: Any, *args: Any) -> None:
            moe.shared_experts = None
            moe.experts = MegaExperts(self.routed)

        backend = mock.patch.object(config.kernel_config, "moe_backend", "deep_gemm_mega_moe")
        parallel = mock.patch.object(config.parallel_config, "enable_expert_parallel", True)
        experts = mock.patch.object(
            self.model.DeepseekV4MoE, "_init_mega_moe_experts", init_experts
        )
        with backend, parallel, experts:
            yield

    def forward(self, moe: Any, hidden: torch.Tensor, ids: torch.Tensor | None, images: bool):
        """Run `moe` in a step with or without image rows; returns (weights, ids) it used."""
        self.stock.clear()
        self.routed.clear()
        with self.running(images):
            moe(hidden, ids)
        ((weights, experts),) = self.routed
        return weights, experts

    @contextlib.contextmanager
    def running(self, images: bool) -> Iterator[None]:
        before = context.set_current(context.StepContext(images))
        try:
            with set_forward_context(None, self.config), torch.inference_mode():
                yield
        finally:
            context.set_current(before)


class QuantMethod(nn.Module):
    """What the runner asks of a quantisation method."""

    is_monolithic = False
    moe_kernel = None
    topk_indices_dtype = None
    supports_internal_mk = False
    has_unpadded_output = False
    mk_owns_shared_expert = False
    skip_forward_padding = False


class MegaExperts(nn.Module):
    """Stands for the MegaMoE kernel."""

    has_fused_shared_experts = False

    def __init__(self, routed: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.routed = routed

    def forward(self, hidden_states, topk_weights, topk_ids, **kwargs):
        self.routed.append((topk_weights, topk_ids))
        return torch.zeros_like(hidden_states)


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


def batch(rows: int, image_rows: list[int], dtype: torch.dtype = torch.int32, seed: int = 0):
    """Random (hidden, ids, mask): `image_rows` hold the five sentinel ids in turn."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.bfloat16)
    ids = torch.randint(0, 128000, (rows,), generator=generator).to(dtype)
    for at, row in enumerate(image_rows):
        ids[row] = IMAGE_IDS[at % 5]
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[image_rows] = True
    return hidden, ids, mask


def expected(moe: Any, hidden: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor):
    """What the published rule gives for a mixed batch, from two separate selections."""
    with torch.inference_mode():
        logits, _ = moe.gate(hidden)
        bias_vl = getattr(moe.gate, select.BIAS_VL)
        safe = torch.where(mask, 0, ids)
        text = plain_route(logits, moe.gate.e_score_correction_bias, safe, moe.gate.tid2eid)
        image = plain_route(logits, bias_vl)
    which = mask.unsqueeze(1)
    return torch.where(which, image[0], text[0]), torch.where(which, image[1], text[1])


def same(found, wanted) -> None:
    """Same experts per row in any order, and each with the same weight."""
    order, order_wanted = found[1].long().argsort(1), wanted[1].long().argsort(1)
    if not torch.equal(found[1].long().gather(1, order), wanted[1].long().gather(1, order_wanted)):
        raise AssertionError(f"experts differ:\n{found[1]}\n{wanted[1]}")
    weights = found[0].gather(1, order)
    torch.testing.assert_close(weights, wanted[0].gather(1, order_wanted), atol=1e-5, rtol=1e-5)


def spec_config(config: Any) -> Any:
    """`config` as a draft model sees it: a speculative config with the same HF config."""
    draft = copy.copy(config)
    draft_hf = copy.copy(config.model_config.hf_config)
    draft_hf.model_type = "deepseek_mtp"  # what vLLM makes of it for MTP
    draft.model_config = copy.copy(config.model_config)
    draft.model_config.hf_config = draft_hf
    draft.speculative_config = SimpleNamespace(draft_model_config=draft.model_config)
    return draft
