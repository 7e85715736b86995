"""A checkpoint that sees, served by ours and by a native vLLM: the same questions over HTTP.

    checks_sees_served.py --report REPORT.json --seconds S and the folders of checks_beside.py

Each side is asked alone, again, by 8 and by 32 clients at once, and with the picture in an earlier
turn. No check begins later than S seconds after both servers are up.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx
from gpu.checkpoint.sees import answer_words, by_question, reach_goals, read_recipe
from gpu.jobs.checks_beside import SIDES, arguments, log, trees
from gpu.jobs.checks_server import encoded
from gpu.lib import sights
from gpu.lib.accuracy import as_alone, as_right, differing
from gpu.lib.rig import Report
from gpu.lib.servers import IMAGES, Server, await_all
from gpu.lib.sights import Asked, Sight

#: Questions asked; of the rows beside "alone".
QUESTIONS, SOME = 480, 300
CLIENTS = (8, 32)


def messages(each: Asked, pictures: Sequence[Sight], earlier: bool) -> list[dict[str, Any]]:
    """A chat: pictures and question in one message, or the pictures in an earlier turn."""
    shown = [
        {"type": "image_url", "image_url": {"url": encoded(pictures[number].image)}}
        for number in each.sights
    ]
    question = {"type": "text", "text": each.question.wording}
    if not earlier:
        return [{"role": "user", "content": [*shown, question]}]
    return [
        {"role": "user", "content": [*shown, {"type": "text", "text": "LOOK AT THIS."}]},
        {"role": "assistant", "content": "YES."},
        {"role": "user", "content": [question]},
    ]


async def answers(
    url: str, asked: Sequence[Asked], pictures: Sequence[Sight], clients: int, earlier: bool = False
) -> list[tuple[int, ...]]:
    """Greedy tokens of each question, ``clients`` at a time. Raises httpx.HTTPError."""
    limit = asyncio.Semaphore(clients)

    async def ask(client: httpx.AsyncClient, each: Asked) -> tuple[int, ...]:
        body = {
            "model": "tiny",
            "messages": messages(each, pictures, earlier),
            "temperature": 0,
            "max_tokens": 2,
            "return_token_ids": True,
            "cache_salt": uuid.uuid4().hex,
        }
        async with limit:
            reply = await client.post(f"{url}/v1/chat/completions", json=body)
            return tuple(reply.raise_for_status().json()["choices"][0]["token_ids"])

    async with httpx.AsyncClient(timeout=60) as client:
        return await asyncio.gather(*(ask(client, each) for each in asked))


class Side:
    """One server's answers; ``alone`` are the first ones."""

    def __init__(self, name: str, url: str, asked: Sequence[Asked], pictures: Sequence[Sight]):
        self.name, self.url, self.asked, self.pictures = name, url, list(asked), pictures
        self.alone: list[tuple[int, ...]] = []
        self.repeats = 0.0

    def ask(self, count: int, clients: int, earlier: bool = False) -> list[tuple[int, ...]]:
        return asyncio.run(answers(self.url, self.asked[:count], self.pictures, clients, earlier))

    def take_alone(self) -> tuple[bool, str]:
        self.alone = self.ask(len(self.asked), 1)
        scores = by_question(self.asked, [tokens[0] for tokens in self.alone])
        return reach_goals(scores), answer_words(self.asked, self.alone)

    def take_repeats(self) -> tuple[None, str]:
        self.repeats = differing(self.alone[:SOME], self.ask(SOME, 1))
        return None, f"{self.repeats:.1%} of {SOME} answers differ between two runs alone"

    def at_once(self, clients: int) -> tuple[bool, str]:
        given = self.ask(SOME, clients)
        share = differing(self.alone[:SOME], given)
        detail = f"{share:.1%} of {SOME} answers differ from alone"
        return as_alone(share, self.repeats), f"{detail}; {answer_words(self.asked[:SOME], given)}"

    def in_an_earlier_turn(self) -> tuple[bool, str]:
        """No such prompt was fitted: what counts is that 32 at once are answered as one is."""
        alone = self.ask(SOME, 1, earlier=True)
        share = differing(alone, self.ask(SOME, CLIENTS[-1], earlier=True))
        detail = f"{share:.1%} of {SOME} answers differ between one and {CLIENTS[-1]} clients"
        return as_alone(share, self.repeats), f"{detail}; {answer_words(self.asked[:SOME], alone)}"


def beside(ours: Side, native: Side) -> tuple[bool, str]:
    """As many right answers as native's, within what the answers that differ allow."""
    right = [sights.token(each.answer) for each in ours.asked]
    mine, theirs = (
        [tokens[0] == one for tokens, one in zip(side.alone, right, strict=True)]
        for side in (ours, native)
    )
    equal = 1 - differing(ours.alone, native.alone)
    only_ours, only_native = (
        sum(a and not b for a, b in zip(one, two, strict=True))
        for one, two in ((mine, theirs), (theirs, mine))
    )
    detail = f"{equal:.1%} of {len(right)} answers equal native's; right on one side alone: "
    detail += f"{only_ours} here, {only_native} there"
    return as_right(only_ours, only_native), detail


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()
    report = Report(args.report)
    plan, _ = read_recipe(args.vision)
    pictures = plan.pictures()
    held_out = sorted(plan.split(pictures)[1], key=lambda each: min(each.sights))[:QUESTIONS]
    servers = {
        side: Server(tree, str(args.vision), 8221 + place, log(args, side, "sees"), IMAGES)
        for place, (side, tree) in enumerate(trees(args).items())
    }
    try:
        for server in servers.values():
            server.start()
        await_all(list(servers.values()), time.monotonic() + args.seconds)
        ask(args, report, {s: Side(s, servers[s].url, held_out, pictures) for s in SIDES})
    finally:
        for server in servers.values():
            server.stop()
    return 0


def ask(args: argparse.Namespace, report: Report, sides: dict[str, Side]) -> None:
    until = time.monotonic() + args.seconds

    def run(name: str, check: Any) -> None:
        if time.monotonic() > until:
            report.add(f"served: {name}", None, "not reached: no time left")
            return
        report.run(f"served: {name}", check)

    for name, side in sides.items():
        run(f"{name} alone", side.take_alone)
    if all(side.alone for side in sides.values()):
        run("ours beside native", lambda: beside(sides["ours"], sides["native"]))
    for name, side in sides.items():
        if not side.alone:
            continue
        run(f"{name}, two runs alone", side.take_repeats)
        for clients in CLIENTS:
            run(f"{name}, {clients} clients", lambda side=side, n=clients: side.at_once(n))
        run(f"{name}, the picture in an earlier turn", side.in_an_earlier_turn)


if __name__ == "__main__":
    sys.exit(main())
