"""The vision model on two real tensor-parallel ranks, which share it or spread images over it."""

from __future__ import annotations

import os
import tempfile
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import cpu_model
import torch
from checks import check, equal, raises
from checks_model import forward_images
from checks_weights import shuffled
from rig_model import Rig, noise

SIZES = ((640, 480), (100, 900), (1400, 1400))


@check
def two_real_ranks(rig: Rig) -> None:
    """Forked, so that vLLM is imported once; must come before this process has a group."""
    # What both ranks read is written before there are two.
    cpu_model.checkpoint(rig, "small")
    rig.vision_folder  # noqa: B018
    rig.text_model_config  # noqa: B018  fills vLLM's cache of model infos
    import vllm.models.deepseek_v4.nvidia.model  # noqa: F401

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["VLLM_DIST_IDENT"] = folder.name  # names the ranks' shared memory
        ranks = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                _in_child(rig, rank, folder)
            ranks.append(pid)
        ended = [os.waitpid(pid, 0)[1] for pid in ranks]
        reports = [(folder / f"{rank}.txt").read_text() for rank in range(2)]
        equal(ended, [0, 0], "\n".join(reports))
        one, two = (torch.load(folder / f"{rank}.pt") for rank in range(2))
        for kind in ("shared", "spread"):
            for mine, other in zip(one[kind], two[kind], strict=True):
                equal(torch.equal(mine, other), True, f"{kind}: both ranks hold the same rows")
        for index, (alone, shared) in enumerate(zip(one["spread"], one["shared"], strict=True)):
            error = (alone.float() - shared.float()).norm() / alone.float().norm()
            # Sums over ranks round once more in BF16 than a whole layer does.
            equal(bool(error < 2e-2), True, f"image {index}: shared and whole differ by {error}")


def _in_child(rig: Rig, rank: int, folder: Path) -> None:
    """Runs one rank and ends the process."""
    os.environ["VISION_EXP_FAST_PIXELS"] = "0"  # the same bits, without compiling in each rank
    code = 1
    try:
        torch.save(_rank(rig, rank, folder / "store"), folder / f"{rank}.pt")
        from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()
        (folder / f"{rank}.txt").write_text("done")
        code = 0
    except Exception:  # noqa: BLE001  reported by the parent
        (folder / f"{rank}.txt").write_text(f"rank {rank}\n{traceback.format_exc()}")
    finally:
        os._exit(code)


def _rank(rig: Rig, rank: int, store: Path) -> dict[str, list[torch.Tensor]]:
    from vision_exp.model.encoder import encode_images

    weights = cpu_model.checkpoint(rig, "small")
    images = [noise(*size, seed=index) for index, size in enumerate(SIZES)]
    out = {}
    for kind, mode in (("shared", "weights"), ("spread", "data")):
        model = cpu_model.build(
            rig,
            "small",
            model_options={"mm_encoder_tp_mode": mode},
            ranks=2,
            rank=rank,
            store=store,
        )
        loaded = model.load_weights(shuffled(weights, seed=rank))
        parameters = dict(model.named_parameters())
        equal(sorted(parameters.keys() - loaded), [], "parameters never loaded")
        share = 2 if kind == "shared" else 1
        wqkv = parameters["vision.blocks.0.attn.wqkv.weight"].data
        whole = weights["vision.blocks.0.attn.wqkv.weight"]
        equal(tuple(wqkv.shape), (len(whole) // share, whole.shape[1]), "wqkv")
        if share == 2:  # this rank's head of q, k and v
            part = len(whole) // 6
            rows = [whole[(2 * i + rank) * part : (2 * i + rank + 1) * part] for i in range(3)]
            equal(torch.equal(wqkv, torch.cat(rows)), True, "rows of wqkv")
        out[kind] = forward_images(model, rig.processor(), rig, images)[1]
    alone = forward_images(model, rig.processor(), rig, images, encode_images)
    for one, other in zip(alone[1], out["spread"], strict=True):
        error = (one.float() - other.float()).norm() / one.float().norm()
        # Another number of rows in one matrix product is summed in another order in BF16.
        equal(bool(error < 5e-3), True, f"spread over ranks and alone differ by {error}")
    _failing(rank, model, rig, images)
    _other_code(rank, rig, store)
    _modes(rank)
    return out


def _failing(rank: int, model: Any, rig: Rig, images: list[Any]) -> None:
    """One rank cannot encode its share: neither goes on, and both can afterwards."""

    def broken(*_: Any) -> torch.Tensor:
        raise ZeroDivisionError("this rank's share")

    with mock.patch.object(model.vision, "forward", broken) if rank else nullcontext():
        error = (RuntimeError, "another rank could not encode its share of the images")
        with raises(*((ZeroDivisionError, "this rank's share") if rank else error)):
            forward_images(model, rig.processor(), rig, images)
    forward_images(model, rig.processor(), rig, images)


def _other_code(rank: int, rig: Rig, store: Path) -> None:
    """Ranks whose overlays differ build nothing."""
    from vision_exp import install
    from vision_exp.model.ranks import RankMismatchError

    own = install.Installed(plan="p", overlay=f"o{rank}")
    with (
        mock.patch.object(install, "installed", own),
        raises(RankMismatchError, "rank 0: overlay o0, plan p", "rank 1: overlay o1, plan p"),
    ):
        cpu_model.build(rig, "small", ranks=2, rank=rank, store=store)


def _modes(rank: int) -> None:
    """What both ranks decide together, from their hosts and what their environments say."""
    from vision_exp.model import ranks
    from vision_exp.tower import mode

    variable, real = mode.settings.TOWER_MODE.name, mode.host
    equal(ranks.tower_mode("weights").name, "weights", "two ranks of this host")
    equal(ranks.tower_mode("data").name, "data", "as vLLM's flag asks")
    try:
        mode.host = lambda: f"host {rank}"
        found = ranks.tower_mode("weights")
        equal((found.name, found.reason), ("data", "2 tensor-parallel ranks on 2 hosts"))
        os.environ[variable] = "weights"
        equal(ranks.tower_mode("data").name, "weights", "the variable decides")
        os.environ[variable] = ("data", "weights")[rank]
        with raises(mode.TowerModeError, "rank 0: data, rank 1: weights"):
            ranks.tower_mode("weights")
    finally:
        mode.host = real
        os.environ.pop(variable, None)
