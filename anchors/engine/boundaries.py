"""Where one vLLM release differs from the one before it in what the overlay needs.

A REQUIRES entry that holds only for some releases ends in `since` or `until` a release of this
table. A tree is judged by its content, never by the version it calls itself: a fork may carry any
number. So each boundary names the fact of a tree that decides it, and that fact is the cause: with
it the overlay has something to do that older trees do not know.

A tree that has the fact of a boundary has passed the earlier ones too. So a later release that
renames an older fact is not taken for an old release, which would hide what it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Boundary:
    """`last` and `first`: the releases before and after it; `fact`: a REQUIRES entry; `why`."""

    last: str
    first: str
    fact: str
    why: str


#: Oldest first. The releases are without the patch number, as entries name them.
BOUNDARIES = (
    Boundary(
        "0.23",
        "0.24",
        "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.prefill_swa_indices",
        "Prefill rows get an index of the window's keys. The overlay widens it so that image "
        "tokens see each other; before, attention has no place for that and images stay causal.",
    ),
    Boundary(
        "0.26",
        "0.27",
        "vllm.models.deepseek_v4.nvidia.model:DeepseekV4DecoderLayer.use_sequence_parallel",
        "Layers and drafts may share the rows of a step between ranks, and a draft may have "
        "several modules. The overlay shares its row mask and looks ahead in the same way.",
    ),
    Boundary(
        "0.27",
        "0.28",
        "vllm.v1.core.sched.scheduler:Scheduler.num_prefill_lookahead"
        " | vllm.v1.core.kv_cache_manager:KVCacheManager.__init__(num_prefill_lookahead)",
        "The scheduler ends no chunk within a draft's lookahead of the prefill's end. The overlay, "
        "which ends chunks between images, must leave it that room.",
    ),
)
