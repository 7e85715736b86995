"""Whether tensor-parallel ranks share each image's arithmetic, or take whole images.

`weights`: a rank holds its part of every layer, and two sums over the ranks close each block: 64
for an image. `data`: a rank holds the whole tower (446 MiB more of two ranks) and its images; the
rows are exchanged once in a step. Between two hosts each sum waits for the network, so there `data`
is the better one; inside one host vLLM's own default stays.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vision_exp import settings

DATA, WEIGHTS = "data", "weights"
#: https://docs.kernel.org/admin-guide/sysctl/kernel.html#random: one value for each boot.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger("vllm.vision_exp")


@dataclass(frozen=True)
class Rank:
    """What one tensor-parallel rank brings to the decision: its host, and what its environment
    says in VISION_EXP_TOWER_MODE."""

    host: str
    setting: str


@dataclass(frozen=True)
class Mode:
    """``data`` or ``weights``, and the reason in words."""

    name: str
    reason: str

    @property
    def data_parallel(self) -> bool:
        return self.name == DATA


class TowerModeError(RuntimeError):
    """Ranks of one model would build different towers."""


def this_rank() -> Rank:
    return Rank(host(), settings.TOWER_MODE.said())


def host() -> str:
    """The same for all containers of a host, which may have names of their own."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def decide(ranks: Sequence[Rank], asked: str) -> Mode:
    """The mode of all ``ranks`` of a tensor-parallel group; the same on each of them.

    ``asked``: vLLM's ``--mm-encoder-tp-mode``, whose `weights` may be its default. TowerModeError
    if the ranks' settings differ, ValueError if they say none of what they may: on every rank,
    since one that gave up alone would leave the others waiting.
    """
    if len({rank.setting for rank in ranks}) > 1:
        said = ", ".join(f"rank {index}: {rank.setting}" for index, rank in enumerate(ranks))
        name = settings.TOWER_MODE.name
        raise TowerModeError(
            f"[vision-exp] {name} differs between the hosts of this model ({said}), so its ranks "
            f"would wait for each other forever. Nothing was started. Next: set {name} alike on "
            "every host, or nowhere, and start again."
        )
    setting = settings.TOWER_MODE.checked(ranks[0].setting)
    if setting != "auto":
        return Mode(setting, f"{settings.TOWER_MODE.name}={setting}")
    if asked == DATA:
        return Mode(DATA, "--mm-encoder-tp-mode data")
    hosts = len({rank.host for rank in ranks})
    if hosts > 1:
        return Mode(DATA, f"{len(ranks)} tensor-parallel ranks on {hosts} hosts")
    return Mode(WEIGHTS, f"{len(ranks)} tensor-parallel ranks on one host")


def log(mode: Mode, ranks: int) -> None:
    """One line, where several ranks make it a question."""
    if ranks > 1:
        kind = "each holds all of it and takes images" if mode.data_parallel else "they share it"
        logger.info(
            "[vision-exp] tower mode %s (%s): %d ranks, %s", mode.name, mode.reason, ranks, kind
        )
