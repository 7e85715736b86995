"""The checks. Each Verdict says what was compared with what.

Every answer is held against repeats of its request, and against answers to another image: where
those are no further away, nothing is concluded (`judge`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import statistics
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from vision_exp.validate import images
from vision_exp.validate.client import Client, Content, Refused
from vision_exp.validate.images import COLOURS, colours_named, disc
from vision_exp.validate.judge import Noise, Reference, Verdict, all_same, both
from vision_exp.validate.reply import Answer
from vision_exp.validate.stream import cancel, cancel_early

NAME_COLOUR = "What colour is the disc? Answer with one word."
#: Its answer, too, depends on the image.
IN_FRENCH = "What colour is the disc? Answer in French, with one word."
LONG_STORY = "Tell a story about this picture, of at least a thousand words."
POSITION = (
    "The picture has one small red disc. Where is its centre? Answer with two whole numbers only: "
    "x in percent of the width from the left, then y in percent of the height from the top."
)
PLACES = (0.1, 0.3, 0.5, 0.7, 0.9)
#: Slopes of a working server were reported near 0.98, of a causal one near 0.3.
SLOPES, LARGEST_ERROR = (0.85, 1.15), 8.0
#: Answers to a request alone, and to the same request with another image.
REPEATS, CONTROLS = 3, 2


@dataclass(frozen=True)
class Session:
    """The server, and what was found out about it: see `run.explore`.

    ``incoherent_reason``: why the content of its answers cannot be judged, ``warm_reason``: why no
    answer is known to be cold; empty where they do not hold. ``noise``: of answers to one request.
    """

    client: Client
    incoherent_reason: str = ""
    warm_reason: str = ""
    noise: Noise = Noise()

    @property
    def is_coherent(self) -> bool:
        return not self.incoherent_reason

    @property
    def supports_cache_salt(self) -> bool:
        return not self.warm_reason

    async def ask(self, *content: str | images.Part, **options: Any) -> Answer:
        return await self.client.ask(content, **options)

    async def cold(self, *content: str | images.Part) -> Answer:
        """Asked with a fresh ``cache_salt``, where the server takes one.

        vLLM then passes its prefix cache; that another server does cannot be seen from here.
        """
        salt = uuid.uuid4().hex if self.supports_cache_salt else ""
        return await self.client.ask(content, salt=salt)

    async def repeat(self, content: Content, times: int = REPEATS) -> list[Answer]:
        return [await self.cold(*content) for _ in range(times)]

    async def reference(self, content: Content, other: Content) -> Reference:
        """What ``content`` is answered alone; ``other`` is the same with another image."""
        return Reference(await self.repeat(content), await self.repeat(other, CONTROLS))

    async def status(self, *content: str | images.Part, **options: Any) -> tuple[int, str]:
        """200, or the status of a refusal with its words."""
        try:
            await self.ask(*content, max_tokens=1, **options)
            return 200, ""
        except Refused as error:
            return error.status, error.reply

    def compare(
        self,
        pairs: list[tuple[Answer, Reference]],
        compared: str,
        detail: str = "",
        also: bool = True,
    ) -> Verdict:
        """Passed only if every answer is its reference's and ``also`` is true."""
        good, note = all_same(pairs, self.noise)
        if self.supports_cache_salt:
            compared += " (alone or cold: asked with a fresh cache_salt, which vLLM honours)"
        else:
            compared += " (without cache_salt, so any answer may be from the server's cache)"
        return Verdict(both(good, also), compared, f"{detail}; {note}".removeprefix("; "))


async def at_once(calls: list[Awaitable[Answer]]) -> list[Answer]:
    """The calls' results in their order. Raises the first's error once all have ended."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found  # type: ignore[return-value]


def shows(colour: str, seed: int, question: str = NAME_COLOUR) -> Content:
    """An image of one colour's disc, and a question."""
    return [disc(colour, seed), question]


async def concurrent(session: Session, count: int) -> Verdict:
    contents = [shows(c, i + 10 * count) for i, c in enumerate(list(COLOURS)[:count])]
    together = await at_once([session.cold(*content) for content in contents])
    alone = [await session.repeat(content) for content in contents]
    others = [sum((a for a in alone if a is not mine), []) for mine in alone]
    pairs = list(zip(together, map(Reference, alone, others), strict=True))
    compared = f"{count} image requests at once against each alone, three times"
    return session.compare(pairs, compared)


async def own_image(session: Session) -> Verdict:
    contents = [shows(colour, 40 + index) for index, colour in enumerate(COLOURS)]
    answers = await at_once([session.cold(*content) for content in contents])
    wrong = [
        f"{colour} called {answer.text!r}"
        for colour, answer in zip(COLOURS, answers, strict=True)
        if colours_named(answer.text) != [colour]
    ]
    compared = "the colour named against the colour drawn, six images at once, same question"
    return Verdict(not wrong, compared, "; ".join(wrong) or "all six right")


async def same_twice(session: Session) -> Verdict:
    one, twin, other = disc("red", 60), disc("red", 61), disc("blue", 60)
    question = "Which colours do the discs in the two pictures have?"
    shared = await session.ask(one, one, question)
    length = (await session.ask(one, twin, question)).prompt_tokens
    single = (await session.ask(one, question, max_tokens=1)).prompt_tokens
    again = await session.ask(one, one, question)
    reference = await session.reference([one, one, question], [other, other, question])
    return session.compare(
        [(shared, reference), (again, reference)],
        "one image twice in a prompt: prompt length as for two, and more than for one; "
        "answers as when asked cold",
        f"{shared.prompt_tokens} and {length} prompt tokens, with one image {single}",
        also=shared.prompt_tokens == length > single,
    )


async def offsets(session: Session) -> Verdict:
    """The block begins with 0 to 3 pads, so that its grid starts on a multiple of four."""
    green, red = disc("green", 70), disc("red", 70)
    texts = ["Look" + " at" * count for count in range(8)]
    plain = [(await session.ask(text, max_tokens=1)).prompt_tokens for text in texts]
    shown = [await session.ask(text, green, NAME_COLOUR) for text in texts]
    pairs = [(a.prompt_tokens - length, length) for a, length in zip(shown, plain, strict=True)]
    fits = any(len({extra - (c - n) % 4 for extra, n in pairs}) == 1 for c in range(4))
    compared = (
        "prompt lengths of one image after eight texts against the rule of the leading pads; "
        "a warm answer against cold ones"
    )
    if len({length % 4 for length in plain}) != 4:
        return Verdict(None, compared, f"the texts did not reach all four offsets: {plain}")
    detail = f"tokens added {[extra for extra, _ in pairs]} after {plain}"
    wrong = [a.text for a in shown if colours_named(a.text) != ["green"]]
    if session.is_coherent and wrong:
        return Verdict(False, compared, f"{detail}; green disc called {wrong[0]!r}")
    reference = await session.reference(
        [texts[1], green, NAME_COLOUR], [texts[1], red, NAME_COLOUR]
    )
    return session.compare([(shown[1], reference)], compared, detail, also=fits)


async def reordered(session: Session) -> Verdict:
    question = "Name the colours of the discs in order, separated by a comma."
    red, blue = disc("red", 80), disc("blue", 80)
    order: Content = [red, blue, question]
    other: Content = [blue, red, question]
    first, swapped, again = [await session.ask(*each) for each in (order, other, order)]
    reference = await session.reference(order, other)
    compared = "two images, swapped, and back: each answer against its order's, asked cold"
    named = True
    if session.is_coherent:
        compared += "; the colours' order against the images' order"
        colours = [colours_named(answer.text) for answer in (first, swapped)]
        named = colours == [["red", "blue"], ["blue", "red"]]
    opposite = Reference(reference.others, reference.alone)
    pairs = [(first, reference), (again, reference), (swapped, opposite)]
    return session.compare(pairs, compared, f"{first.text!r} and swapped {swapped.text!r}", named)


async def prefix_fork(session: Session) -> Verdict:
    study, yellow, red = "Study this. " * 60, disc("yellow", 90), disc("red", 90)
    questions = (NAME_COLOUR, IN_FRENCH)
    asked = [await session.reference([study, yellow, q], [study, red, q]) for q in questions]
    # Where both questions have one answer, a mixed-up one would not be distinguishable.
    cold = [
        Reference(mine.alone, mine.others + other.alone, "another image or the other question")
        for mine, other in (asked, reversed(asked))
    ]
    warm = [await session.ask(study, yellow, question) for question in (*questions, *questions)]
    compared = "two questions about one image, by turns on a shared prefix, against cold answers"
    return session.compare(list(zip(warm, [*cold, *cold], strict=True)), compared)


async def cancelled(session: Session) -> Verdict:
    content = shows("black", 100)
    reference = await session.reference(content, shows("red", 100))
    before = await session.ask(*content)
    cuts = [await cancel(session.client, shows("white", seed, LONG_STORY)) for seed in (101, 102)]
    early = await cancel_early(session.client, shows("white", 103, LONG_STORY))
    compared = "two streamed answers: whether they ran when they were hung up on"
    for cut in cuts:
        if cut.error:
            return Verdict(False, compared, f"the stream went wrong: {cut.error}")
        if cut.ended and not cut.pieces:
            return Verdict(False, compared, f"no piece of an answer came: {cut.ended}")
        if cut.ended:
            return Verdict(None, compared, f"nothing was hung up on: {cut.ended}")
    compared = "an answer before and after two running answers were hung up on"
    detail = f"hung up after {cuts[0].pieces} and {cuts[1].pieces} pieces"
    if early.pieces or early.ended or early.error:
        detail += f", none before its first ({early.error or early.ended or 'it had come'})"
    else:
        compared += ", and a third before its first token"
    pairs = [(before, reference), (await session.ask(*content), reference)]
    return session.compare(pairs, compared, detail)


async def bad_then_good(session: Session) -> Verdict:
    content = shows("white", 110)
    reference = await session.reference(content, shows("red", 110))
    before = await session.ask(*content)
    statuses = {
        name: (await session.status(part, NAME_COLOUR))[0] for name, part in images.broken().items()
    }
    return session.compare(
        [(before, reference), (await session.ask(*content), reference)],
        "the status of two bad images against 4xx; a good answer before and after",
        f"{statuses}",
        also=all(400 <= status < 500 for status in statuses.values()),
    )


async def system_image(session: Session) -> Verdict:
    """Images belong to user messages; elsewhere they are an error, not a silent drop."""
    system = {"role": "system", "content": [disc("red", 120)]}
    status, _ = await session.status("Hello", before=[system])
    compared = "the status of an image in a system message against 400"
    return Verdict(status == 400, compared, f"HTTP {status}")


async def shapes(session: Session) -> Verdict:
    """Every shape is taken, and costs the tokens that the released transform gives it."""
    expected = expected_tokens()
    base = (await session.ask("What is it?", max_tokens=1)).prompt_tokens
    wrong, seen = [], []
    for width, height in images.SHAPES:
        part = images.part(images.noise(width, height))
        try:
            added = (await session.ask(part, "What is it?", max_tokens=1)).prompt_tokens - base
        except Refused as error:
            wrong.append(f"{width}x{height}: {error.reply}")
            continue
        seen.append(f"{width}x{height} {added}")
        # Pads (0 to 3) and the separator between image and text come on top of the block.
        if expected and not 0 <= added - expected(width, height) <= 5:
            wrong.append(f"{width}x{height}: {added} tokens, block {expected(width, height)}")
    compared = "status of images of many shapes against 200" + (
        ", their tokens against the released transform's, leading pads apart" if expected else ""
    )
    return Verdict(not wrong, compared, "; ".join(wrong or seen))


def expected_tokens() -> Callable[[int, int], int] | None:
    """Block length without leading pads, by the overlay's own code; None where torch is missing."""
    if importlib.util.find_spec("torch") is None:
        return None
    from vision_exp.image.transform import llm_grid_of, vit_grid_for
    from vision_exp.layout import GROUP, block_length
    from vision_exp.preview import RELEASED

    def tokens(width: int, height: int) -> int:
        grid = llm_grid_of(vit_grid_for(width, height, RELEASED), RELEASED)
        return block_length(grid, GROUP - 1)

    return tokens


async def formats(session: Session) -> Verdict:
    parts = images.formats()
    found = {name: await session.status(part, "What is it?") for name, part in parts.items()}
    wrong = [f"{name}: {words}" for name, (status, words) in found.items() if status != 200]
    compared = "status of images of many formats and colour modes against 200"
    return Verdict(not wrong, compared, "; ".join(wrong) or f"{len(parts)} accepted")


async def positions(session: Session) -> Verdict:
    """Markers on a five by five grid; slope and mean error of the answers along both axes.

    Describing, counting and reading all pass on a server whose image tokens see each other only
    causally; answered coordinates then shrink towards the middle. So the slope is what is judged.
    """
    answered: list[tuple[float, ...]] = []
    unreadable = []
    for x, y in [(x, y) for y in PLACES for x in PLACES]:
        text = (await session.ask(images.marker(x, y), POSITION, max_tokens=24)).text
        numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]
        if len(numbers) == 2:
            answered.append((100 * x, 100 * y, *numbers))
        else:
            unreadable.append(text)
    compared = (
        "answered positions of a marker against its true ones, slope and error, "
        f"{len(answered)} of {len(PLACES) ** 2} places"
    )
    # A whole row or column may be missing from few answers: of that side nothing would be known.
    if len(answered) < 20 or any(len({a[axis] for a in answered}) < len(PLACES) for axis in (0, 1)):
        words = f"too few places, or none of a whole row or column: {len(unreadable)} unreadable"
        return Verdict(False, compared, f"{words}, as {unreadable[0]!r}")
    columns = list(zip(*answered, strict=True))
    good, words = True, ""
    for name, (true, found) in {"x": columns[::2], "y": columns[1::2]}.items():
        slope = statistics.linear_regression(true, found).slope
        error = statistics.fmean(abs(t - f) for t, f in zip(true, found, strict=True))
        good = good and SLOPES[0] <= slope <= SLOPES[1] and error <= LARGEST_ERROR
        words += f"{name}: slope {slope:.3f}, mean error {error:.1f} %; "
    return Verdict(good, compared, f"{words}{len(unreadable)} unreadable")


class Check(NamedTuple):
    """``missing``: why a server cannot be judged by it; empty where it can."""

    name: str
    run: Callable[[Session], Awaitable[Verdict]]
    missing: Callable[[Session], str] = lambda session: ""


COHERENT, CACHE_SALT = attrgetter("incoherent_reason"), attrgetter("warm_reason")
CHECKS = (
    Check("two concurrent image requests", partial(concurrent, count=2)),
    Check("three concurrent image requests", partial(concurrent, count=3)),
    Check("each request its own image", own_image, COHERENT),
    Check("the same image twice", same_twice),
    Check("one image at every offset", offsets),
    Check("images in another order", reordered),
    Check("a prefix fork", prefix_fork, CACHE_SALT),
    Check("a cancelled request", cancelled),
    Check("a bad image, then a good one", bad_then_good),
    Check("an image in a system message", system_image),
    Check("images of all shapes", shapes),
    Check("formats and colour modes", formats),
    Check("positions in an image", positions, COHERENT),
)
