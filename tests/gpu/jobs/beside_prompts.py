"""Prompts of ours and of a native vLLM: the same token ids, first tokens as native repeats them.

40 prompts with one to four images, every size of the goldens, several turns, tools, thinking on and
off; eight texts of the same kinds beside them show what two releases differ by without an image.
"""

from __future__ import annotations

import json
import urllib.request
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.jobs.checks_server import data_url
from gpu.lib.answers import PROBED, distance, spread
from gpu.lib.rig import Report

GOLDENS = Path(__file__).resolve().parents[2] / "goldens" / "image_layout.json"
PROMPTS, TEXTS = 40, 8
#: Times that native, and ours, are asked.
NATIVE_REPEATS, OUR_REPEATS = 3, 1
TOOL = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Shows a part of an image.",
        "parameters": {"type": "object", "properties": {"factor": {"type": "number"}}},
    },
}


@dataclass(frozen=True)
class Prompt:
    """A chat request; ``kinds`` says in words what is in it."""

    kinds: str
    body: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class First:
    """A prompt's token ids and the first token's log-probabilities of PROBED."""

    ids: list[int]
    row: dict[int, float]


def prompts() -> list[Prompt]:
    """The 40: prompt i begins with the goldens' size i, so that each size is met."""
    sizes = [(one["width"], one["height"]) for one in json.loads(GOLDENS.read_text())["images"]]
    return [
        prompt(i, [sizes[(i + 7 * k) % len(sizes)] for k in range(1 + i % 4)])
        for i in range(PROMPTS)
    ]


def texts() -> list[Prompt]:
    return [prompt(4 * index, []) for index in range(TEXTS)]


def prompt(index: int, sizes: list[tuple[int, int]]) -> Prompt:
    """Of ``index``'s bits: text before or after the images, turns, tools, thinking."""
    turns, tools, thinking = (bool((index // 4) >> bit & 1) for bit in range(3))
    images = [
        {"type": "image_url", "image_url": {"url": data_url(*size, seed=1000 * index + k)}}
        for k, size in enumerate(sizes)
    ]
    asked = {"type": "text", "text": f"Number {index}: what is shown?"}
    messages: list[dict[str, Any]] = []
    if turns:
        messages += [
            {"role": "user", "content": [*images[:1], {"type": "text", "text": "Look.\n\n"}]},
            {"role": "assistant", "content": "I see."},
        ]
    rest = images[1:] if turns else images
    content = [asked, *rest] if index % 3 == 0 else [*rest, asked]
    messages.append({"role": "user", "content": content})
    kinds = [f"{len(sizes)} images {sizes}"]
    kinds += [
        word for word, on in (("turns", turns), ("tools", tools), ("thinking", thinking)) if on
    ]
    body: dict[str, Any] = {"messages": messages, "chat_template_kwargs": {"thinking": thinking}}
    return Prompt(", ".join(kinds), body | ({"tools": [TOOL]} if tools else {}))


def ask(url: str, body: dict[str, Any]) -> First:
    """One greedy token. Raises OSError for a refusal, ValueError for an answer that lacks ids."""
    asked = body | {
        "model": "tiny",
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": len(PROBED),
        "allowed_token_ids": list(PROBED),
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "cache_salt": uuid.uuid4().hex,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    ids = answer.get("prompt_token_ids")
    if not ids:
        raise ValueError("the answer does not tell its prompt's token ids")
    listed = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    row = {int(entry["token"].removeprefix("token_id:")): entry["logprob"] for entry in listed}
    if row.keys() != set(PROBED):
        raise ValueError(f"{len(row)} log-probabilities of {len(PROBED)}")
    return First(ids, row)


def compare_prompts(report: Report, urls: dict[str, str]) -> None:
    """Rows for the ids and the first tokens. ``urls``: of "ours" and "native"."""
    distances: dict[str, list[tuple[float, float]]] = {}
    for kind, asked in (("image", prompts()), ("text", texts())):
        different = []
        for index, each in enumerate(asked):
            try:
                native = [ask(urls["native"], each.body) for _ in range(NATIVE_REPEATS)]
                ours = [ask(urls["ours"], each.body) for _ in range(OUR_REPEATS)]
            except (OSError, ValueError) as error:
                different.append(f"{index} ({each.kinds}): {error}")
                continue
            if ours[0].ids != native[0].ids:
                different.append(f"{index} ({each.kinds}): {parting(ours[0].ids, native[0].ids)}")
            away = min(distance(ours[0].row, one.row) for one in native)
            distances.setdefault(kind, []).append((away, spread([one.row for one in native])))
        words = f"{len(asked) - len(different)} of {len(asked)} equal"
        report.add(
            f"{kind} prompts: token ids as native's",
            not different,
            "; ".join([words, *different])[:4000],
        )
    for kind, found in distances.items():
        report.add(f"{kind} prompts: first token as native repeats it", *assess(kind, found))


def assess(kind: str, found: list[tuple[float, float]]) -> tuple[bool | None, str]:
    """Pairs of nats: from ours to the nearest of native's, and native's own largest.

    A text has nothing of vision in it: how far ours is there is the two releases' difference,
    which is told and not assessed.
    """
    noise = max(own for _, own in found)
    outside = [(i, away) for i, (away, _) in enumerate(found) if away > noise]
    farthest = max(away for away, _ in found)
    words = f"at most {farthest:.3f} nats from native, native's repeats up to {noise:.3f}"
    words += f"; {len(outside)} of {len(found)} further than that"
    if outside:
        words += ": " + ", ".join(f"{i} by {away:.3f}" for i, away in outside[:40])
    return (None if kind == "text" else not outside), words


def parting(mine: list[int], theirs: list[int]) -> str:
    """Where two prompts part, with the ids there."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    at = next((i for i, (one, two) in pairs if one != two), min(len(mine), len(theirs)))
    return (
        f"{len(mine)} and {len(theirs)} ids, part at {at}: "
        f"{mine[at : at + 4]} and {theirs[at : at + 4]}"
    )
