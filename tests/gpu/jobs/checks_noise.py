"""Where repeats of one cold prompt in one engine start to differ, on a GPU with the real kernels.

    checks_noise.py MODEL REPORT.json

Hooks record what the embeddings, and each layer's attention, gate, experts and shared experts got
and gave. The first module to finish with other bits than in another repeat, though it got the same
bits in all of them, is where repeats part. Only an experts module may be that: what is compared bit
for bit elsewhere relies on everything before the first experts repeating itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.jobs import checks_reference
from gpu.lib.rig import Ask, Engine, Report, text_ids

REPEATS = 6
#: Modules of the language model that are recorded, by name; one that is not there or is never
#: called through its hooks is left out.
RECORDED = re.compile(
    r"embed_tokens|layers\.\d+(\.attn|\.ffn|\.ffn\.(gate|experts|shared_experts))?"
)
LAYER = re.compile(r"layers\.\d+")


@dataclass(frozen=True)
class Call:
    """One module's call: the tensors it got, before it ran, and those it gave; float32, CPU."""

    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


@dataclass(frozen=True)
class Parting:
    """A module that gave other bits for the same bits."""

    name: str
    #: Share of rows, of the output tensor with most of them, that are not the same in all repeats.
    rows: float
    #: Largest difference of one value between two repeats.
    largest: float
    #: Repeats that differ from the first.
    repeats: int


def main(folder: str, report_path: str) -> int:
    report = Report(Path(report_path))
    engine = Engine(folder, enable_prefix_caching=False)
    for name, ask in asks().items():
        report.run(f"{name}: where repeats part first", lambda a=ask: parts(engine, a))
    return 0


def asks() -> dict[str, Ask]:
    """The prompts of the other checks, and a text as short as a square image's block."""
    return checks_reference.asks() | {"text of 114": Ask(text_ids(114, 3))}


def parts(engine: Engine, ask: Ask) -> tuple[bool, str]:
    """Runs the prompt REPEATS times, cold, and assesses where the runs part."""
    repeats, tokens = [], set()
    for _ in range(REPEATS):
        engine.forget()
        with recorded(engine.model.model) as calls:
            answer = engine.ask(ask, max_tokens=1)[0]
        repeats.append(calls)
        tokens.add(answer.tokens[0])
    good, words = assess(repeats)
    return good, f"{words}; {len(tokens)} distinct first tokens in {REPEATS} repeats"


@contextmanager
def recorded(model: Any) -> Iterator[list[Call]]:
    """Records one eager prefill of ``model`` (DeepseekV4Model), in order of completion.

    A module's later calls are ignored. What the model got as embeddings is a call without inputs.
    """
    calls: list[Call] = []
    inputs: dict[str, list[torch.Tensor]] = {}
    done: set[str] = set()

    def before(name: str) -> Any:
        def hook(_module: Any, args: tuple, kwargs: dict) -> None:
            if name not in done:
                inputs[name] = copies((args, kwargs))

        return hook

    def after(name: str) -> Any:
        def hook(_module: Any, _args: tuple, output: Any) -> None:
            if name not in done and name in inputs:
                done.add(name)
                calls.append(Call(name, inputs.pop(name), copies(output)))

        return hook

    def embedded(_module: Any, args: tuple, kwargs: dict) -> None:
        embeds = args[3] if len(args) > 3 else kwargs.get("inputs_embeds")
        if embeds is not None and "inputs_embeds" not in done:
            done.add("inputs_embeds")
            calls.append(Call("inputs_embeds", [], copies(embeds)))

    hooks = [model.register_forward_pre_hook(embedded, with_kwargs=True)]
    for name, module in model.named_modules():
        if RECORDED.fullmatch(name):
            hooks.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(after(name)))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def copies(values: Any) -> list[torch.Tensor]:
    """Float32 CPU copies of all tensors in nested tuples, lists and dicts, in order."""
    if isinstance(values, torch.Tensor):
        return [values.detach().to("cpu", torch.float32, copy=True)]
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in copies(value)]
    return []


def assess(repeats: Sequence[Sequence[Call]]) -> tuple[bool, str]:
    """Whether repeats part in an experts module first, or not at all; and what was found."""
    calls = repeats[0]
    layers = [index for index, call in enumerate(calls) if LAYER.fullmatch(call.name)]
    if not layers:
        raise RuntimeError("no layer's output was recorded")
    parting = first_parting(repeats)
    last = spread([run[layers[-1]].outputs for run in repeats])[1]
    kinds = list(dict.fromkeys(re.sub(r"layers\.\d+", "layer", call.name) for call in calls))
    tail = f"last layer's output differs by at most {last:.3g}; recorded: {', '.join(kinds)}"
    if parting is not None:
        words = (
            f"{parting.name} for equal inputs: {parting.rows:.1%} of rows differ, by at most "
            f"{parting.largest:.3g}, in {parting.repeats} of {len(repeats) - 1} repeats"
        )
        return "experts" in parting.name.split("."), f"{words}; {tail}"
    for same_call in zip(*repeats, strict=True):
        if not same([call.outputs for call in same_call]):
            return False, f"{same_call[0].name} first, and its inputs differ too; {tail}"
    return True, f"nothing differs in {len(calls)} modules; {tail}"


def first_parting(repeats: Sequence[Sequence[Call]]) -> Parting | None:
    """The first call, in order of completion, with equal inputs in all repeats and other outputs.

    A module inside another finishes first, so it is the innermost one that is recorded.
    """
    names = [[call.name for call in calls] for calls in repeats]
    if any(each != names[0] for each in names):
        raise RuntimeError("repeats called different modules, or in another order")
    for calls in zip(*repeats, strict=True):
        outputs = [call.outputs for call in calls]
        if same([call.inputs for call in calls]) and not same(outputs):
            others = sum(not same([outputs[0], each]) for each in outputs[1:])
            return Parting(calls[0].name, *spread(outputs), others)
    return None


def same(runs: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether all runs have the same tensors, bit for bit: a NaN equals itself."""
    return all(
        len(run) == len(runs[0])
        and all(
            one.shape == other.shape and torch.equal(bits(one), bits(other))
            for one, other in zip(runs[0], run, strict=True)
        )
        for run in runs[1:]
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def spread(runs: Sequence[Sequence[torch.Tensor]]) -> tuple[float, float]:
    """Share of rows that are not the same in all runs, and the largest difference of two runs.

    Tensors of other shapes differ wholly, and so does what is not a number in one run only.
    """
    shapes = [[tensor.shape for tensor in run] for run in runs]
    if any(each != shapes[0] for each in shapes):
        return 1.0, float("inf")
    share, largest = 0.0, 0.0
    for tensors in zip(*runs, strict=True):
        if not tensors[0].numel():
            continue
        stacked = torch.stack(list(tensors))
        moved = (bits(stacked) != bits(stacked[:1])).any(dim=0)
        if not moved.any():
            continue
        rows = moved.reshape(moved.shape[0] if moved.dim() else 1, -1).any(dim=1)
        share = max(share, float(rows.float().mean()))
        values = stacked[:, moved]
        gaps = (values.amax(dim=0) - values.amin(dim=0)).nan_to_num(float("inf"), float("inf"))
        largest = max(largest, float(gaps.max()))
    return share, largest


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
