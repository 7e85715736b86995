"""Prefix-cache retention: what the next requests hit, by where the prompt's image lies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rig_scheduling import TEXT, VISION, build, request, step

SIZE = 368  # tokens of the image


def hits(hf_config: Any, offset: int, tail: int, **options: Any) -> dict[str, Any]:
    """Tokens that a repeat and the next turn find cached, and blocks that the first one left.

    The prompt ends `tail` tokens after its image; its answer has four tokens.
    """
    out: dict[str, Any] = {}
    for name in ("repeat", "next turn"):
        scheduler = build(hf_config, tokens=4096, caching=True, **options)
        first, _ = ask(scheduler, "first", offset, offset + SIZE + tail)
        out["blocks"] = left(scheduler)
        tokens = list(first.prompt_token_ids)
        if name == "next turn":
            tokens += [*first.output_token_ids, *range(300, 360)]
        _, out[name] = ask(scheduler, name, offset, len(tokens), tokens)
    return out


def ask(scheduler: Any, name: str, offset: int, length: int, tokens: Any = None) -> Any:
    """The request, when it has its answer, and how many of its tokens were cached."""
    made = request(scheduler, name, length, [(offset, SIZE, "a")], tokens=tokens)
    scheduler.add_request(made)
    seen: dict[str, list[tuple[int, int]]] = {}
    while scheduler.requests:
        step(scheduler, seen)
    return made, seen[name][0][0]


def left(scheduler: Any) -> int:
    """Sliding-window blocks that stay in the prefix cache."""
    pool = scheduler.kv_cache_manager.block_pool
    held = [block.block_hash for block in pool.blocks if block.block_hash is not None]
    groups = [int.from_bytes(key[-4:], "big") for key in held]
    return sum(group > 0 for group in groups)


def compare(offsets: Iterable[int], tails: Iterable[int], **options: Any) -> list[dict[str, Any]]:
    """For each place of the image: what is hit with dense retention, stock sparse, and ours."""
    return [
        {
            "offset": offset,
            "tail": tail,
            "dense": hits(VISION, offset, tail, **options),
            "sparse": hits(VISION, offset, tail, retention=0, **options),
        }
        for offset in offsets
        for tail in tails
    ]


def retention() -> dict[str, Any]:
    """Every kind of place of the last image, with and without a draft's group."""
    found = {}
    for name, draft in (("plain", False), ("draft", True)):
        rows = compare((3, 200, 255, 319, 478, 654), (1, 10, 200), draft=draft)
        found[name] = {
            "worse": [
                row
                for row in rows
                for what in ("repeat", "next turn")
                if row["sparse"][what] < row["dense"][what]
            ],
            "hits": sorted({row["dense"]["repeat"] for row in rows}),
            "most blocks": max(row["sparse"]["blocks"] for row in rows),
        }
    scheduler = build(TEXT, tokens=512, caching=True, retention=0)
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    names = ("cache_blocks", "reachable_block_mask")
    found["text"] = [name for name in names for manager in managers if name in vars(manager)]
    return found
