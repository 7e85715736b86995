"""Text requests through one tree and one checkpoint: what was computed, kept bit for bit.

    dump_text.py MODEL OUT.pt

Run once per tree, and more than once on the stock tree; `compare_text.py` assesses. Everything is
asked twice: what differs within one process is noise of vLLM. Up to 64 rows a step vLLM's expert
kernels are reproducible, so most prompts are short. Also kept: the names of the CUDA kernels of one
text-only prefill and three decode steps, stream by stream.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.lib.capture import logits_of
from gpu.lib.rig import Ask, Engine, text_ids

#: Prompt lengths, one after another, and one batch of several.
ALONE = (1, 7, 16, 33, 40, 60, 64, 500)
TOGETHER = (60, 120, 200)
ROUNDS = 2
#: Of the profiled request: one prefill, and this many tokens less one decode steps.
PROFILED_LENGTH, PROFILED_TOKENS = 40, 4


def main(model: str, out: str) -> int:
    engine = Engine(model)
    rounds = [one_round(engine) for _ in range(ROUNDS)]
    torch.save({"rounds": rounds, "kernels": kernels(engine)}, out)
    finite = all(
        bool(torch.isfinite(value).all()) for found in rounds for value in found["tensors"].values()
    )
    print(f"{len(rounds[0]['tensors'])} tensors, finite={finite}", flush=True)
    return 0 if finite else 1


def one_round(engine: Engine) -> dict[str, Any]:
    """Answers' tokens and tensors by name: ``"PROMPT/KIND STEP"``, all on the CPU."""
    tensors: dict[str, torch.Tensor] = {}
    tokens: dict[str, list[list[int]]] = {}
    batches = {f"{length} tokens": (length,) for length in ALONE}
    batches["together"] = TOGETHER
    for name, lengths in batches.items():
        if not engine.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied")
        asks = [Ask(text_ids(length, 10 + length)) for length in lengths]
        found: list[tuple[str, torch.Tensor]] = []
        hooks = [
            engine.model.model.layers[0].attn.register_forward_hook(keeping(found, "attention 0")),
            engine.model.model.register_forward_hook(keeping(found, "hidden")),
        ]
        try:
            with logits_of(engine.model) as logits:
                tokens[name] = [answer.tokens for answer in engine.ask(*asks, max_tokens=5)]
        finally:
            for hook in hooks:
                hook.remove()
        found += [("logits", values) for values in logits]
        counts: dict[str, int] = {}
        for kind, values in found:
            counts[kind] = counts.get(kind, -1) + 1
            tensors[f"{name}/{kind} {counts[kind]}"] = values
    return {"tensors": tensors, "tokens": tokens}


def keeping(found: list[tuple[str, torch.Tensor]], kind: str) -> Callable[..., None]:
    """A forward hook that copies the module's output to the CPU."""

    def hook(_module: Any, _args: Any, output: torch.Tensor) -> None:
        found.append((kind, output.detach().cpu()))

    return hook


def kernels(engine: Engine) -> list[list[str]]:
    """Names of what ran on the GPU, in order, one list per stream, busiest stream first."""
    from torch.profiler import ProfilerActivity, profile

    ask = Ask(text_ids(PROFILED_LENGTH, 77))
    engine.llm.reset_prefix_cache()
    engine.ask(ask, max_tokens=PROFILED_TOKENS)  # compiles and tunes
    engine.llm.reset_prefix_cache()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        engine.ask(ask, max_tokens=PROFILED_TOKENS)
        torch.cuda.synchronize()
    streams: dict[int, list[tuple[int, str]]] = {}
    for event in found.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            streams.setdefault(event.device_resource_id(), []).append(
                (event.start_ns(), event.name())
            )
    lists = [[name for _, name in sorted(events)] for events in streams.values()]
    return sorted(lists, key=len, reverse=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
