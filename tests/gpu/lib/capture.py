"""Records what a model instance computes: embeddings in, hidden states out, experts chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu.lib.rig import replaced


@dataclass
class Captured:
    """Rows of all steps, in order: ``embeds`` and ``hidden`` (n, hidden), ``experts`` per layer."""

    ids: list[torch.Tensor] = field(default_factory=list)
    embeds: list[torch.Tensor] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    experts: list[list[torch.Tensor]] = field(default_factory=list)

    def layer(self, index: int) -> torch.Tensor:
        return torch.cat(self.experts[index])


@contextmanager
def capture(model: Any) -> Iterator[Captured]:
    """Records every eager step of ``model`` (DeepseekV4ForCausalLM) until the block ends."""
    found = Captured(experts=[[] for _ in model.model.layers])

    def before(_module: Any, args: tuple, kwargs: dict) -> None:
        ids, embeds = args[0], args[3] if len(args) > 3 else kwargs.get("inputs_embeds")
        if ids is not None:
            found.ids.append(ids.detach().cpu())
        if embeds is not None:
            found.embeds.append(embeds.detach().float().cpu())

    def after(_module: Any, _args: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found.hidden.append(hidden.detach().float().cpu())

    def recorder(router: Any, rows: list[torch.Tensor]) -> Any:
        choose = router.select_experts

        def select(*args: Any, **kwargs: Any) -> Any:
            weights, chosen = choose(*args, **kwargs)
            rows.append(chosen.detach().long().sort(dim=-1).values.cpu())
            return weights, chosen

        return select

    with ExitStack() as stack:
        for index, layer in enumerate(model.model.layers):
            router = layer.ffn.experts.router
            select = recorder(router, found.experts[index])
            stack.enter_context(replaced(router, "select_experts", select))
        hooks = [
            model.model.register_forward_pre_hook(before, with_kwargs=True),
            model.model.register_forward_hook(after),
        ]
        stack.callback(lambda: [hook.remove() for hook in hooks])
        yield found


def row_error(found: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Relative distance of each row, ||found - reference|| / ||reference||."""
    return (found - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-12)


def same_experts(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Share of the (row, choice) pairs of ``found`` that ``reference`` also chose."""
    hits = (found[:, :, None] == reference[:, None, :]).any(dim=-1)
    return float(hits.float().mean())


@contextmanager
def logits_of(model: Any) -> Iterator[list[torch.Tensor]]:
    """Records the logits of every step, float32 on the CPU."""
    found: list[torch.Tensor] = []
    compute = model.compute_logits

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        values = compute(hidden)
        found.append(values.detach().float().cpu())
        return values

    with replaced(model, "compute_logits", recorded):
        yield found
