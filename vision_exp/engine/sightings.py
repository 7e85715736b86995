"""What the layers did in one step with image rows, and which of them let image rows pass unseen.

A wrapper that vLLM goes around says nothing: the rows are text rows to it. So each layer notes that
it chose experts for image rows, or saw a whole image, and the notes are compared with what the
rank's model has: at start-up by model/selftest.py, in service after each step with image rows. The
notes are set entries of Python; steps without image rows and captured graphs make none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.vision_exp")

_LAYERS = "_vision_exp_layers"  # attribute of a model runner


@dataclass(frozen=True)
class Sightings:
    """Notes of one step, by id of the module.

    entered: MoE layers that were called. routed: those that chose experts by `bias_vl`, with the
    mask of image rows, bool (rows,), that they used. attended: attention layers that widened the
    rows of an image.
    """

    entered: set[int] = field(default_factory=set)
    routed: dict[int, torch.Tensor] = field(default_factory=dict)
    attended: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Block:
    """One decoder layer of this rank: its name, and the ids of its MoE and attention modules."""

    name: str
    moe: int
    attention: int


@dataclass(frozen=True)
class Layers:
    """The decoder layers of a rank's target and draft that must see image rows.

    attention: whether image rows see their whole image here; else they are causal by declaration.
    """

    target: tuple[Block, ...]
    draft: tuple[Block, ...] = ()
    attention: bool = True

    def unseen(self, seen: Sightings) -> list[str]:
        """What a step with an image of the target left out."""
        wide = self.target if self.attention else ()
        return [f"{one.name} (routing)" for one in self.target if one.moe not in seen.routed] + [
            f"{one.name} (attention)" for one in wide if one.attention not in seen.attended
        ]

    def unseen_in_draft(self, seen: Sightings) -> list[str]:
        """Layers of the draft that ran and did not choose by `bias_vl`."""
        passed = seen.entered - seen.routed.keys()
        return [f"{one.name} (draft routing)" for one in self.draft if one.moe in passed]


def some(names: Sequence[str], most: int = 6) -> str:
    """The first of `names`, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def watch(runner: Any, layers: Layers) -> None:
    """From now on compare the steps of `runner` with what its model has."""
    setattr(runner, _LAYERS, layers)


def check(runner: Any, seen: Sightings | None, *, draft: bool) -> None:
    """Log, once for a runner, which layers a step with image rows passed by.

    draft: after the draft of the step, whose layers are asked then; else after the target.
    """
    layers: Layers | None = getattr(runner, _LAYERS, None)
    if seen is None or layers is None:
        return
    unseen = layers.unseen_in_draft(seen) if draft else layers.unseen(seen)
    if unseen:
        setattr(runner, _LAYERS, None)
        logger.error(
            "[vision-exp] image rows passed unseen through layers (%d): %s. Answers about images "
            "are wrong from here on; text is served as before. Restart the server: its start-up "
            "self-test names what bypasses them",
            len(unseen),
            some(unseen),
        )
