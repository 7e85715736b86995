"""What image rows see, on a GPU with the real kernels: hidden states, and one layer's attention.

    visibility_check.py MODEL REPORT.json

Without prefix caching, and with prompts of fixed lengths. "Off" answers come from the same engine
with the metadata builders told that nothing may be widened. What START sees is read off the output
of the first layer's attention: nothing that varies from run to run comes before it. Behind the
expert layers vLLM's own results vary, so the last layer is reported and not assessed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.lib.answers import noise_of
from gpu.lib.capture import capture
from gpu.lib.cobatched import Rows, place, same_rows
from gpu.lib.equivalence import Runs, nearness, same_answers
from gpu.lib.rig import (
    SQUARE,
    WIDE,
    Ask,
    Engine,
    Report,
    random_image,
    replaced,
    text_ids,
    with_images,
)
from gpu.reference.attention import Recorded

from vision_exp import layout
from vision_exp.visibility import spans, support

#: Relative error of BF16 attention against float32 over the same cached keys.
BF16_LIMIT = 2e-2
TEXT_REPEATS = 3
#: Tokens of the prompts with images.
LENGTHS = (469, 217, 627)
#: Cold runs of a prompt, runs co-batched, and runs with the feature off.
COLD, TOGETHER, OFF = 5, 2, 2


def main(folder: str, report_path: str) -> int:
    report = Report(Path(report_path))
    engine = Engine(folder, probed=True, enable_prefix_caching=False)
    report.run("start-up says", lambda: described(engine))
    for name, ask in prompts().items():
        report.run(f"{name}: START sees the last patch", partial(last_patch, engine, ask))
        report.run(f"{name}: attention", partial(attention, engine, ask))
    report.run("text: no row is widened", lambda: text_only(engine))
    report.run("concurrent requests: what their image rows see", lambda: concurrent_rows(engine))
    report.run("concurrent requests see what they see alone", lambda: concurrent(engine))
    return 0


def prompts() -> dict[str, Ask]:
    square, wide = random_image(*SQUARE, seed=1), random_image(*WIDE, seed=2)
    return {
        "366 tokens": with_images(60, [wide], 40, 4),
        "114 tokens": with_images(60, [square], 40, 4),
        "two images": with_images(61, [wide, square], 62, 5),
    }


def described(engine: Engine) -> tuple[bool, str]:
    status = support.describe(engine.llm.llm_engine.vllm_config)
    return status == support.BIDIRECTIONAL, status


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


def seen_by_rows(
    engine: Engine, *asks: Ask, cold: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of one step: first layer's attention output, last hidden states, token ids."""
    if cold:
        engine.forget()
    first: list[torch.Tensor] = []
    hook = engine.model.model.layers[0].attn.register_forward_hook(
        lambda _module, _args, output: first.append(output.detach().float().cpu())
    )
    try:
        with capture(engine.model) as found:
            engine.ask(*asks, max_tokens=1)
    finally:
        hook.remove()
    if len(asks) > 1 and len(first) > 1:
        raise RuntimeError(f"the prompts were computed in {len(first)} steps")
    return torch.cat(first), torch.cat(found.hidden), torch.cat(found.ids)


def last_patch(engine: Engine, ask: Ask) -> tuple[bool, str]:
    """Another last patch of the last image: START moves, rows before that image do not."""
    changed = Ask(ask.ids, (*ask.images[:-1], other_corner(ask.images[-1])))
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
        f"moved {off_moved:.3g}; last layer, not assessed: START moved "
        f"{largest(last_before[start] - last_after[start]):.3g}, with the same prompt again "
        f"{largest(last_before[start] - last_again[start]):.3g}"
    )
    return moved > 0 and max(earlier, noise, off_moved) == 0, detail


def largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def other_corner(image: Any) -> Any:
    """The image with its last patch inverted."""
    changed = image.copy()
    box = (image.width - 14, image.height - 14, image.width, image.height)
    corner = changed.crop(box).point(lambda value: 255 - value)
    changed.paste(corner, box)
    return changed


def text_only(engine: Engine) -> tuple[bool, str]:
    """A text prompt with the feature and without, against repeats of the same.

    Exact: no batch had rows to widen, and the first layer's attention has the same bits. The last
    layer is assessed too where it repeats itself; on prompts of this length it rarely does.
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


def together() -> dict[str, Ask]:
    """The prompts with images, and a text as long as the longest of them: it varies as they do."""
    return prompts() | {"text of 627": Ask(text_ids(627, 3))}


def concurrent_rows(engine: Engine) -> tuple[bool, str]:
    """Submitted together, each image's rows get what they get alone from the first attention.

    All runs take the first one's encodings: the tower runs other kernels over several images.
    """
    engine.forget()
    seen: list[int] = []
    with watched(seen):
        batched = first_attention(engine, *together().values())
    count = len(batched.ids)
    alone = {name: beside_text(engine, ask, count) for name, ask in prompts().items()}
    with causal(engine):
        off = {name: first_attention(engine, ask) for name, ask in prompts().items()}
    good, words = same_rows(alone, batched, off, BF16_LIMIT)
    return good and max(seen, default=0) == 4, f"{max(seen, default=0)} images in one step; {words}"


def first_attention(engine: Engine, *asks: Ask) -> Rows:
    """Of images that the engine has encoded before, what it has of them."""
    values, _, ids = seen_by_rows(engine, *asks, cold=False)
    return Rows(values, ids)


def beside_text(engine: Engine, ask: Ask, count: int) -> Rows:
    """Rows of a prompt that shares its step with text alone, ``count`` tokens in all.

    How many tokens a step has decides how vLLM splits its sums, and the FP8 products behind make
    a last bit of those a few percent of a row.
    """
    ids = first_attention(engine, ask).ids
    found = first_attention(engine, ask, Ask(text_ids(count - len(ids), 8)))
    return Rows(found.values[place(found.ids, ids)], ids)


def concurrent(engine: Engine) -> tuple[bool, str]:
    """Submitted together, prompts get the answers of cold runs alone, as equivalence.py has it.

    A text for each prompt with images, of its length and co-batched too: what the furthest of three
    moves by is no measure for the furthest of one.
    """
    asks = together()
    twins = {f"twin of {count}": Ask(text_ids(count, count)) for count in LENGTHS}
    cold = {name: [engine.cold(ask) for _ in range(COLD)] for name, ask in (asks | twins).items()}
    seen: list[int] = []
    rounds = []
    with watched(seen):
        for _ in range(TOGETHER):
            engine.forget()
            rounds.append(dict(zip(asks, engine.ask(*asks.values()), strict=True)))
            found = zip(twins, engine.ask(*twins.values()), strict=True)
            rounds[-1].update(found)
    with causal(engine):
        off = {name: [engine.cold(ask) for _ in range(OFF)] for name, ask in prompts().items()}
    runs = {name: Runs(cold[name], [found[name] for found in rounds]) for name in cold}
    images, texts = ([runs[n] for n in cold if (n in off) is image] for image in (True, False))
    controls = {f"feature off, {name}": nearness(cold[name], found) for name, found in off.items()}
    noise = noise_of(list(text.cold) for text in texts)
    good, words = same_answers(images, texts, controls, noise)
    return good and max(seen, default=0) == 4, f"{max(seen, default=0)} images in one step; {words}"


@contextmanager
def watched(seen: list[int]) -> Iterator[None]:
    """Counts the images of every batch for which metadata is built."""
    plain = spans.image_visibility

    def counted(*args: Any) -> Any:
        found = plain(*args)
        seen.append(0 if found is None else len(found.spans))
        return found

    with replaced(spans, "image_visibility", counted):
        yield


def attention(engine: Engine, ask: Ask) -> tuple[bool, str]:
    """Each layer kind's prefill output against masked attention in float32 over the same keys."""
    words: list[str] = []
    good = True
    layers: dict[int, Any] = {1: None, 4: None, 128: None}
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
