"""Memory that the vision tower and the aligner take on each rank, from the released sizes."""

from __future__ import annotations

LAYERS, DIM, INNER, PATCH, CELLS, HIDDEN = 32, 1024, 2816, 588, 9, 4096
_BYTES = 2  # BF16

#: Measured on an H200 but for the cache: rows of 4096 BF16 numbers, as many as tokens in a batch.
BESIDE = (
    "0.14 GiB for CUDA graphs (data mode or one rank), 0.02 for the largest image, and "
    "8 KiB for each token of --max-num-batched-tokens; nothing with --limit-mm-per-prompt "
    "'{\"image\":0}'"
)


def parameters(ranks: int) -> int:
    """Parameters on one of `ranks` tensor-parallel ranks; 1 also stands for the data mode.

    Column- and row-parallel weights are shared; norms, the patch projection, biases added after a
    sum over the ranks, and the learned vectors are whole on each.
    """
    shared_block = 3 * DIM * DIM + 3 * DIM + DIM * DIM + 2 * INNER * DIM + DIM * INNER
    whole_block = DIM + 2 * DIM
    shared_aligner = HIDDEN * CELLS * DIM + HIDDEN + HIDDEN * HIDDEN
    shared = LAYERS * shared_block + shared_aligner
    whole = LAYERS * whole_block + PATCH * DIM + DIM + DIM + HIDDEN + 4 * HIDDEN
    return shared // ranks + whole


def gibibytes(ranks: int) -> float:
    """The same in GiB of BF16."""
    return parameters(ranks) * _BYTES / 2**30
