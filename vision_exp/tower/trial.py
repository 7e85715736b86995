"""Tries the kinds of attention that a GPU has, at start: which is right, and which is fastest.

Which one wins depends on the card and on what its vLLM and torch were built with, so that no table
could say it. Each attends two images the way a CUDA graph of the tower will: a length that is read
on the device, in more rows, with something behind the image's last one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vision_exp.tower.attention import Kind, on_device

#: (rows of a graph, rows of the image in it): images of 28x28 and 42x74 patches.
SIZES = ((895, 784), (3135, 3108))
#: Largest relative distance from float32; BF16 rounds by up to 2 ** -9, twice.
ERROR = 2**-6
#: A kind that comes later in the list has to be this much faster, so that starts choose alike.
FASTER = 0.95
#: Calls that are timed together.
CALLS = 8

logger = logging.getLogger("vllm.vision_exp")

Replay = Callable[[], None]
#: Runs some work once and gives what repeats it: a CUDA graph's replay, or the work itself.
Capture = Callable[[Callable[[], None]], Replay]


class WrongAttentionError(RuntimeError):
    """An attention kernel's result is not attention."""


@dataclass(frozen=True)
class Stage:
    """Where kinds are tried: heads and values of each, and how calls are captured and timed.

    ``milliseconds`` of one run of a replay."""

    heads: int
    dim: int
    device: torch.device
    capture: Capture
    milliseconds: Callable[[Replay], float]


def choose(kinds: Sequence[Kind], stage: Stage) -> Kind | None:
    """The fastest of those that are right, None if none is. One line in the log."""
    best: tuple[float, Kind] | None = None
    said = []
    for kind in kinds:
        try:
            times = [attempt(kind, stage, *size) for size in SIZES]
        except Exception as error:  # noqa: BLE001  kernels that compile raise what they like
            reason = str(error).strip().partition("\n")[0]
            said.append(f"{kind.name} left out ({type(error).__name__}: {reason[:200]})")
            continue
        said.append(f"{kind.name} {times[0]:.0f} and {times[1]:.0f}")
        if best is None or sum(times) < FASTER * best[0]:
            best = (sum(times), kind)
    logger.log(
        logging.INFO if best else logging.WARNING,
        "[vision-exp] tower attention: %s (microseconds for %d and %d rows: %s)",
        best[1].name if best else "torch without graphs, since nothing that was tried is right",
        *(length for _, length in SIZES),
        "; ".join(said),
    )
    return best[1] if best else None


def attempt(kind: Kind, stage: Stage, rows: int, length: int) -> float:
    """Microseconds of a call for an image of ``length`` rows. WrongAttentionError where a row is
    wrong; or whatever the kernels raise."""
    random = torch.Generator(stage.device).manual_seed(0)
    shape = (rows, 3, stage.heads, stage.dim)
    qkv = torch.randn(shape, device=stage.device, generator=random).bfloat16()
    qkv[length:] *= 50  # as an earlier image leaves it
    image, seqlens = qkv[:length], [length // 3, length - length // 3]
    check("packed images", kind.packed(image, seqlens), image.split(seqlens))
    attend = kind.image(rows, stage.heads, stage.device)(on_device((0, length), stage.device))
    check("an image", attend(qkv)[:length], [image])

    def calls() -> None:
        for _ in range(CALLS):
            attend(qkv)

    return stage.milliseconds(stage.capture(calls)) * 1e3 / CALLS


def check(what: str, found: torch.Tensor, images: Sequence[torch.Tensor]) -> None:
    """WrongAttentionError unless the first and last rows of each image are attention in it."""
    parts = found.split([len(qkv) for qkv in images])
    for part, qkv in zip(parts, images, strict=True):
        q, k, v = qkv.float().permute(1, 2, 0, 3).unbind()  # (heads, n, d)
        picked = torch.cat((q[:, :32], q[:, -32:]), dim=1)
        weights = (picked @ k.transpose(1, 2) * qkv.shape[-1] ** -0.5).softmax(-1)
        expected = (weights @ v).transpose(0, 1).flatten(1)
        close = torch.cat((part[:32], part[-32:])).float() - expected
        error = float(close.norm() / expected.norm())
        if not error <= ERROR:
            raise WrongAttentionError(f"{what}: off by {error:.2g}")
