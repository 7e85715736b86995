"""What FP8 costs a float32 reference: activations, KV cache and residual rounded on the way.

As vLLM computes a block-FP8 checkpoint on Hopper: 128 values of an input share a power of two, 64
of a key do, and the residual is BF16. Experts take BF16 inputs there (weights alone are FP4).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from gpu.reference.lm import ReferenceLM

#: Largest value of e4m3.
_LARGEST = 448


def rounded(x: torch.Tensor, group: int = 128) -> torch.Tensor:
    """``x`` (..., n * group) float32 as FP8 with one scale for each ``group`` values keeps it."""
    parts = x.unflatten(-1, (-1, group))
    largest = parts.abs().amax(-1, keepdim=True).clamp_min(1e-10)
    scale = torch.exp2(torch.ceil(torch.log2(largest / _LARGEST)))
    return ((parts / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


@contextmanager
def quantised(model: ReferenceLM) -> Iterator[None]:
    """Rounds like FP8 and BF16 serving until the block ends."""
    rope = model.model.config.qk_rope_head_dim

    def into(_module: object, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (rounded(args[0]), *args[1:])

    def key(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        return torch.cat((rounded(output[..., :-rope], 64), output[..., -rope:].bfloat16()), -1)

    def residual(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        return output.bfloat16().float()

    with ExitStack() as stack:
        for layer in model.model.layers:
            attention, shared = layer.self_attn, layer.mlp.shared_experts
            inputs = [attention.q_a_proj, attention.q_b_proj, attention.kv_proj]
            inputs += [attention.o_a_proj, attention.o_b_proj]
            inputs += [shared.gate_proj, shared.up_proj, shared.down_proj]
            keys = [attention.kv_norm]
            if attention.compressor is not None:
                keys.append(attention.compressor.kv_norm)
            for module in inputs:
                stack.callback(module.register_forward_pre_hook(into).remove)
            for module in keys:
                stack.callback(module.register_forward_hook(key).remove)
            for module in (layer, layer.input_layernorm, layer.post_attention_layernorm):
                stack.callback(module.register_forward_hook(residual).remove)
        yield
