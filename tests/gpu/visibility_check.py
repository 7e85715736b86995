"""What image rows see, on a GPU with the real kernels: hidden states, and one layer's attention.

    visibility_check.py MODEL REPORT.json

Without prefix caching, and with prompts of fixed lengths. "Off" answers come from the same engine
with the metadata builders told that nothing may be widened. What START sees is judged on the output
of the first layer's attention: nothing that varies from run to run comes before it. Behind the
expert layers vLLM's own results vary, so the last layer is reported and not judged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.capture import capture
from gpu.rig import SQUARE, WIDE, Ask, Engine, Report, picture, replaced, text_ids, with_images

from vision_exp import layout, step, visibility

#: Relative error of BF16 attention against float32 over the same cached keys.
BF16_LIMIT = 2e-2
TEXT_REPEATS = 3


def main(folder: str, report_path: str) -> int:
    report = Report(Path(report_path))
    engine = Engine(folder, enable_prefix_caching=False)
    report.run("start-up says", lambda: described(engine))
    for name, ask in prompts().items():
        report.run(f"{name}: START sees the last patch", lambda a=ask: last_patch(engine, a))
        report.run(f"{name}: attention", lambda a=ask: attention(engine, a))
    report.run("text: no row is widened", lambda: text_only(engine))
    report.run("concurrent requests see what they see alone", lambda: concurrent(engine))
    return 0


def prompts() -> dict[str, Ask]:
    square, wide = picture(*SQUARE, seed=1), picture(*WIDE, seed=2)
    return {
        "366 tokens": with_images(60, [wide], 40, 4),
        "114 tokens": with_images(60, [square], 40, 4),
        "two images": with_images(61, [wide, square], 62, 5),
    }


def described(engine: Engine) -> tuple[bool, str]:
    said = visibility.describe(engine.llm.llm_engine.vllm_config)
    return said == visibility.BIDIRECTIONAL, said


def builders(engine: Engine) -> list[Any]:
    found = []
    for groups in engine.runner.attn_groups:
        for group in groups:
            builder = group.get_metadata_builder(0)
            if hasattr(builder, "_vision_exp_tokens"):
                found.append(builder)
    return found


@contextmanager
def causal(engine: Engine) -> Iterator[None]:
    """The feature off: as on an installation that cannot widen rows."""
    kept = [(builder, builder._vision_exp_tokens) for builder in builders(engine)]
    if not kept:
        raise RuntimeError("no sliding-window metadata builder found")
    try:
        for builder, _ in kept:
            builder._vision_exp_tokens = 0
        yield
    finally:
        for builder, tokens in kept:
            builder._vision_exp_tokens = tokens


def hidden(engine: Engine, ask: Ask) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, hidden) of the prompt, and its token ids as the model got them."""
    _, last, ids = seen_by_rows(engine, ask)
    return last, ids


def seen_by_rows(engine: Engine, ask: Ask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of the prompt: first layer's attention output, last hidden states, token ids."""
    engine.forget()
    first: list[torch.Tensor] = []
    hook = engine.model.model.layers[0].attn.register_forward_hook(
        lambda _module, _args, output: first.append(output.detach().float().cpu())
    )
    try:
        with capture(engine.model) as found:
            engine.ask(ask, max_tokens=1)
    finally:
        hook.remove()
    return torch.cat(first), torch.cat(found.hidden), torch.cat(found.ids)


def last_patch(engine: Engine, ask: Ask) -> tuple[bool, str]:
    """Another last patch of the last picture: START moves, rows before that picture do not."""
    changed = Ask(ask.ids, (*ask.pictures[:-1], other_corner(ask.pictures[-1])))
    before, last_before, ids = seen_by_rows(engine, ask)
    after, last_after, _ = seen_by_rows(engine, changed)
    again, last_again, _ = seen_by_rows(engine, ask)
    starts = (ids == layout.SENTINEL_FIRST + layout.TokenType.START).nonzero().flatten()
    start = int(starts[-1])
    moved = largest(before[start] - after[start])
    earlier = largest(before[:start] - after[:start])
    noise = largest(before - again)
    with causal(engine):
        off, off_changed = (seen_by_rows(engine, each)[0] for each in (ask, changed))
    off_moved = largest(off[start] - off_changed[start])
    detail = (
        f"first layer's attention of {len(before)} rows: START moved {moved:.3g}, the {start} rows "
        f"before it {earlier:.3g}, the same prompt again {noise:.3g}; with the feature off START "
        f"moved {off_moved:.3g}; last layer, not judged: START moved "
        f"{largest(last_before[start] - last_after[start]):.3g}, with the same prompt again "
        f"{largest(last_before[start] - last_again[start]):.3g}"
    )
    return moved > 0 and max(earlier, noise, off_moved) == 0, detail


def largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def other_corner(image: Any) -> Any:
    """The picture with its last patch inverted."""
    changed = image.copy()
    box = (image.width - 14, image.height - 14, image.width, image.height)
    corner = changed.crop(box).point(lambda value: 255 - value)
    changed.paste(corner, box)
    return changed


def text_only(engine: Engine) -> tuple[bool, str]:
    """A text prompt with the feature and without, against repeats of the same.

    Exact: no batch had rows to widen, and the first layer's attention has the same bits. The last
    layer is judged too where it repeats itself; on prompts of this length it rarely does.
    """
    ask = Ask(text_ids(300, 3))
    seen: list[int] = []
    with watched(seen):
        on = [seen_by_rows(engine, ask) for _ in range(TEXT_REPEATS)]
    with causal(engine):
        off = [seen_by_rows(engine, ask) for _ in range(TEXT_REPEATS)]
    first = all(torch.equal(on[0][0], other[0]) for other in on + off)
    moved = max(largest(a[1] - b[1]) for a in on for b in off)
    noise = max(largest(a[1] - b[1]) for runs in (on, off) for a in runs for b in runs)
    detail = (
        f"images in its batches: {max(seen, default=0)}; first layer's attention of "
        f"{len(on[0][0])} rows equal bit for bit in {TEXT_REPEATS} runs with the feature and "
        f"{TEXT_REPEATS} without: {first}; last layer: on to off {moved:.3g}, repeats of one "
        f"{noise:.3g}"
    )
    return max(seen, default=0) == 0 and first and (moved == 0 or noise > 0), detail


def concurrent(engine: Engine) -> tuple[bool, str]:
    """Prompts submitted together: each image's rows have the neighbours they have alone."""
    asks = list(prompts().values()) + [Ask(text_ids(300, 3))]
    alone = [engine.cold(ask).first for ask in asks]
    engine.forget()
    seen: list[int] = []
    with watched(seen):
        together = engine.ask(*asks)
    with causal(engine):
        off = [engine.cold(ask).first for ask in asks[:1]]
    moved = [distance(a, b.first) for a, b in zip(alone, together, strict=True)]
    image, text = max(moved[:-1]), moved[-1]
    detail = (
        f"{max(seen, default=0)} images in one step; first token moved {image:.3g}, text "
        f"{text:.3g}; with the feature off {distance(alone[0], off[0]):.3g}"
    )
    return max(seen, default=0) > 1 and image <= 2 * text + 0.1, detail


def distance(one: dict[int, float], two: dict[int, float]) -> float:
    shared = one.keys() & two.keys()
    return max((abs(one[token] - two[token]) for token in shared), default=float("inf"))


@contextmanager
def watched(seen: list[int]) -> Iterator[None]:
    """Counts the images of every batch for which metadata is built."""
    plain = visibility.visible_rows

    def counted(*args: Any) -> Any:
        found = plain(*args)
        seen.append(0 if found is None else len(found.spans))
        return found

    with replaced(visibility, "visible_rows", counted):
        yield


def attention(engine: Engine, ask: Ask) -> tuple[bool, str]:
    """Each layer kind's prefill output against masked attention in float32 over the same keys."""
    words, good = [], True
    layers = {1: None, 4: None, 128: None}
    for layer in engine.model.model.layers:
        layers[layer.attn.compress_ratio] = layer.attn
    for ratio, attn in layers.items():
        if attn is None:
            continue
        found = Recorded(attn)
        with found.recording():
            hidden(engine, ask)
        error, off = found.errors()
        words.append(f"ratio {ratio}: error {error:.3g} (against causal {off:.3g})")
        good = good and error < BF16_LIMIT and off > 5 * error
    return good, "; ".join(words)


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
        spans = next(iter(step.current().spans.values()))
        errors = []
        for widened in (True, False):
            mask = self.allowed(rows, stop, [(s.start, s.end) for s in spans] if widened else [])
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
