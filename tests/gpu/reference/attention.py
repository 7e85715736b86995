"""One attention layer of the model against float32 masked attention over the same cached keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu.lib.rig import replaced

from vision_exp.engine import context


class Recorded:
    """One layer's `_forward_prefill`: its inputs, the index rows' meaning and its output.

    The keys are read back from the caches by vLLM's own gather, before the kernel; which of them a
    row may see is computed here from positions.
    """

    def __init__(self, attn: Any) -> None:
        self.attn = attn
        self.calls: list[tuple[float, float]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        plain = self.attn._forward_prefill

        def recorded(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            self.calls.append(self.compare(kwargs))

        with replaced(self.attn, "_forward_prefill", recorded):
            yield

    def errors(self) -> tuple[float, float]:
        if not self.calls:
            raise RuntimeError("the layer did not prefill")
        return max(e for e, _ in self.calls), max(o for _, o in self.calls)

    def compare(self, kwargs: dict[str, Any]) -> tuple[float, float]:
        """Relative error of the first prefill request's rows: against the rule, against causal."""
        attn, meta = self.attn, kwargs["swa_metadata"]
        stop = int(meta.prefill_seq_lens_cpu[0])
        rows = int(meta.prefill_query_lens_cpu[0])
        keys = self.gather(kwargs["swa_k_cache"], meta.block_table, meta.block_size, stop, meta)
        compressed = chosen = None
        if attn.compress_ratio > 1:
            info = kwargs["attn_metadata"]
            size = info.block_size // attn.compress_ratio
            count = stop // attn.compress_ratio
            compressed = self.gather(
                kwargs["compressed_k_cache"], info.block_table, size, count, meta
            )
            if attn.compress_ratio == 4:
                base = meta.num_decode_tokens
                chosen = attn.topk_indices_buffer[base : base + rows]
            else:
                chosen = info.c128a_prefill_topk_indices[:rows]
        query, output = kwargs["q"][:rows], kwargs["output"][:rows]
        spans = next(iter(context.current().spans.values()))
        errors = []
        for widened in (True, False):
            mask = self.allowed(
                rows, stop, [(s.first, s.stop - 1) for s in spans] if widened else []
            )
            want = self.attend(query, keys, mask, compressed, chosen, stop)
            heads = attn.n_local_heads
            difference = output[:, :heads].float() - want[:, :heads]
            scale = want[:, :heads].flatten(1).norm(dim=1)
            errors.append(float((difference.flatten(1).norm(dim=1) / scale).max()))
        return errors[0], errors[1]

    def gather(self, cache: Any, table: Any, size: int, count: int, meta: Any) -> torch.Tensor:
        """Keys [0, count) of the first prefill request, float32 (count, 512)."""
        from vllm.models.deepseek_v4.common.ops import dequantize_and_gather_k_cache

        found = torch.zeros(1, count, 512, dtype=torch.bfloat16, device=cache.device)
        lens = torch.tensor([count], dtype=torch.int32, device=cache.device)
        row = table[meta.num_decodes : meta.num_decodes + 1]
        dequantize_and_gather_k_cache(
            found,
            cache,
            seq_lens=lens,
            gather_lens=lens,
            block_table=row,
            block_size=size,
            offset=0,
        )
        return found[0].float()

    def allowed(self, rows: int, stop: int, spans: list[tuple[int, int]]) -> torch.Tensor:
        """Bool (rows, stop): window keys that each row sees, by the rule."""
        query = torch.arange(stop - rows, stop, device="cuda")[:, None]
        key = torch.arange(stop, device="cuda")[None]
        mask = (key <= query) & (key > query - self.attn.window_size)
        for start, end in spans:
            both = (query >= start) & (query <= end) & (key >= start) & (key <= end)
            mask = mask | both
        return mask

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        mask: torch.Tensor,
        compressed: torch.Tensor | None,
        chosen: torch.Tensor | None,
        stop: int,
    ) -> torch.Tensor:
        if compressed is not None and chosen is not None:
            rows = query.shape[0]
            position = torch.arange(stop - rows, stop, device="cuda")
            count = ((position + 1) // self.attn.compress_ratio).clamp(max=chosen.shape[1])
            used = torch.arange(chosen.shape[1], device="cuda")[None] < count[:, None]
            extra = torch.zeros(rows, compressed.shape[0] + 1, dtype=torch.bool, device="cuda")
            extra.scatter_(1, torch.where(used, chosen, compressed.shape[0]).long(), True)
            mask = torch.cat([mask, extra[:, :-1]], dim=1)
            keys = torch.cat([keys, compressed])
        scores = torch.einsum("thd,kd->thk", query.float(), keys) * self.attn.scale
        scores = scores.masked_fill(~mask[:, None], -float("inf"))
        sink = self.attn.attn_sink.float()[None, :, None].expand(scores.shape[0], -1, 1)
        weight = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
        return torch.einsum("thk,kd->thd", weight, keys)
