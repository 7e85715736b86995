"""The checks. Each Verdict says what was compared with what.

Every answer is held against repeats of its request, and against answers to another image: where
those are no further away, nothing is concluded (`judge`).
"""

import itertools
import re
import statistics
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from vision_exp.validate import images, metrics
from vision_exp.validate.client import BUSY, COUNT, Answer, Client, Content, Refused, at_once
from vision_exp.validate.images import COLOURS, NAME_COLOUR, colours_named, disc, part, shows
from vision_exp.validate.judge import Good, Noise, Reference, Verdict, all_same, both

#: Its answer, too, depends on the image.
IN_FRENCH = "What colour is the disc? Answer in French, with one word."
LONG_STORY = "Tell a story about this picture, of at least a thousand words."
POSITION = (
    "The picture has one small red disc. Where is its centre? Answer with two whole numbers only: "
    "x in percent of the width from the left, then y in percent of the height from the top."
)
#: Slopes of a working server were reported near 0.98, of a causal one near 0.3; places in percent.
PLACES, SLOPES, LARGEST_ERROR = (10, 30, 50, 70, 90), (0.85, 1.15), 8.0


@dataclass(frozen=True)
class Session(Client):
    """A server, and what was found out about it.

    ``incoherent_reason``: why the content of its answers cannot be judged, ``warm_reason``: why no
    answer is known to be cold; empty where they do not hold. ``noise``: of answers to one request.
    """

    incoherent_reason: str = ""
    warm_reason: str = ""
    noise: Noise = Noise()

    async def cold(self, content: Content) -> Answer:
        """Past vLLM's prefix cache, where the server takes a ``cache_salt``."""
        salt = {} if self.warm_reason else {"cache_salt": uuid.uuid4().hex}
        return await self.ask(content, **salt)

    async def repeat(self, content: Content, times: int = 3) -> list[Answer]:
        return [await self.cold(content) for _ in range(times)]

    async def attempt(self, content: Content, **options: Any) -> Answer | Refused:
        """One token, or the refusal of what was asked: not that the server is busy."""
        try:
            return await self.ask(content, max_tokens=1, **options)
        except Refused as error:
            if error.status == BUSY:
                raise
            return error

    async def compare(
        self,
        what: str,
        contents: Sequence[Content],
        answers: Sequence[tuple[int, Answer]],
        detail: str = "",
        also: Good = True,
        other: str = "another image",
    ) -> Verdict:
        """Passed only if every answer is that of its content, told by its index, and ``also``.

        Each content is asked alone, and stands as ``other`` for the rest of them.
        """
        alone = [await self.repeat(content) for content in contents]
        rest = [[a for group in alone if group is not mine for a in group] for mine in alone]
        pairs = [(answer, Reference(alone[i], rest[i], other)) for i, answer in answers]
        good, note = all_same(pairs, self.noise)
        how = "alone or cold: asked with a fresh cache_salt, which vLLM honours"
        how = "without cache_salt, any may be from the server's cache" if self.warm_reason else how
        detail = f"{detail}; {note}".removeprefix("; ")
        return Verdict(both(good, also), f"{what} ({how})", detail)


Run = Callable[[Session], Awaitable[Verdict]]


async def concurrent(session: Session, count: int) -> Verdict:
    contents = [shows(c, i + 10 * count) for i, c in enumerate(COLOURS[:count])]
    together = await at_once([session.cold(content) for content in contents])
    what = f"{count} image requests at once against each alone"
    return await session.compare(what, contents, list(enumerate(together)))


async def own_image(session: Session) -> Verdict:
    answers = await at_once([session.cold(shows(c, 40 + i)) for i, c in enumerate(COLOURS)])
    called = dict(zip(COLOURS, (answer.text for answer in answers), strict=True))
    wrong = [f"{c} called {text!r}" for c, text in called.items() if colours_named(text) != [c]]
    what = "the colour named against the colour drawn, six images at once, same question"
    return Verdict(not wrong, what, "; ".join(wrong) or "all six right")


async def same_twice(session: Session) -> Verdict:
    one, twin, other = (part(disc(*each)) for each in (("red", 60), ("red", 61), ("blue", 60)))
    question = "Which colours do the discs in the two pictures have?"
    asked = [[one, one], [one, twin], [one], [one, one]]
    shared, two, single, again = [await session.ask([*shown, question]) for shown in asked]
    lengths = [answer.prompt_tokens for answer in (shared, two, single)]
    what = "one image twice in a prompt: its length as for two, and more than for one; its answers"
    detail = "{} and {} prompt tokens, with one image {}".format(*lengths)
    counted = lengths[0] == lengths[1] > lengths[2]
    contents = [[one, one, question], [other, other, question]]
    return await session.compare(what, contents, [(0, shared), (0, again)], detail, counted)


async def offsets(session: Session) -> Verdict:
    """The block begins with 0 to 3 pads, so that its grid starts on a multiple of four."""
    green, red = part(disc("green", 70)), part(disc("red", 70))
    texts = ["Look" + " at" * count for count in range(8)]
    plain = [(await session.ask([text], max_tokens=1)).prompt_tokens for text in texts]
    shown = [await session.ask([text, green, NAME_COLOUR]) for text in texts]
    pairs = [(a.prompt_tokens - n, n) for a, n in zip(shown, plain, strict=True)]
    wrong = [a.text for a in shown if colours_named(a.text) != ["green"]]
    good: Good = any(len({e - (c - n) % 4 for e, n in pairs}) == 1 for c in range(4))
    detail = f"tokens added {[extra for extra, _ in pairs]} after {plain}"
    if len({length % 4 for length in plain}) != 4:
        good, detail = None, f"the texts did not reach all four offsets: {plain}"
    if wrong and not session.incoherent_reason:
        good, detail = False, f"{detail}; green disc called {wrong[0]!r}"
    contents = [[texts[1], image, NAME_COLOUR] for image in (green, red)]
    what = "prompt lengths of one image after eight texts against the rule of the leading pads; "
    return await session.compare(f"{what}a warm answer", contents, [(0, shown[1])], detail, good)


async def reordered(session: Session) -> Verdict:
    question = "Name the colours of the discs in order, separated by a comma."
    red, blue = part(disc("red", 80)), part(disc("blue", 80))
    contents = [red, blue, question], [blue, red, question]
    answers = [(index, await session.ask(contents[index])) for index in (0, 1, 0)]
    first, swapped = answers[0][1].text, answers[1][1].text
    what, named = "two images, swapped, and back: each answer against its order's, asked cold", True
    if not session.incoherent_reason:
        what += "; the colours' order against the images' order"
        named = colours_named(first) == ["red", "blue"] == colours_named(swapped)[::-1]
    detail = f"{first!r} and swapped {swapped!r}"
    return await session.compare(what, contents, answers, detail, named)


async def prefix_fork(session: Session) -> Verdict:
    study, questions = "Study this. " * 60, (NAME_COLOUR, IN_FRENCH)
    shown = [part(disc(colour, 90)) for colour in ("yellow", "red")]
    contents = [[study, image, question] for image in shown for question in questions]
    warm = [(index, await session.ask(contents[index])) for index in (0, 1, 0, 1)]
    what = "two questions about one image, by turns on a shared prefix, against cold answers"
    # Where both questions have one answer, a mixed-up one would not be distinguishable.
    other = "another image or the other question"
    return await session.compare(what, contents, warm, other=other)


async def undisturbed(session: Session, colour: str, disturb: Run) -> Verdict:
    """An answer before and after ``disturb``, which says whether that itself went as it must."""
    contents = [shows(colour, 100), shows("red", 100)]
    before = await session.ask(contents[0])
    good, what, detail = await disturb(session)
    answers = [(0, before), (0, await session.ask(contents[0]))]
    what = f"an answer before and after {what}"
    return await session.compare(what, contents, answers, detail, good)


async def hang_up(session: Session) -> Verdict:
    story = [shows("white", seed, LONG_STORY) for seed in (101, 102, 103)]
    # vLLM's; without it a model may have nothing more to say after a word.
    longer = {} if session.warm_reason else {"ignore_eos": True}
    what = "two running answers were hung up on"
    cuts = [await session.cancel(each, **longer) for each in story[:2]]
    for cut in cuts:
        if why := cut.error or cut.ended:
            good = False if cut.error or not cut.pieces else None
            return Verdict(good, what, f"nothing was hung up on: {why}")
    detail = f"hung up after {cuts[0].pieces} and {cuts[1].pieces} pieces"
    early = await session.cancel_early(story[2])
    if why := early.error or early.ended or ("it had come" if early.pieces else ""):
        return Verdict(True, what, f"{detail}, none before its first ({why})")
    return Verdict(True, f"{what}, and a third before its first token", detail)


async def send_bad(session: Session) -> Verdict:
    whole = images.encode(disc("red", 111))
    bad = {"no image": b"this is no image", "cut short": whole[: len(whole) // 2]}
    found = {name: (await session.attempt([part(bad[name]), NAME_COLOUR])).status for name in bad}
    good = all(400 <= status < 500 for status in found.values())
    return Verdict(good, "two bad images, and their status against 4xx", f"{found}")


async def unaccepted(session: Session) -> Verdict:
    """An image must not be taken for known after a request that never got it to the engine."""
    contents = [shows(colour, 130) for colour in COLOURS[:3]]
    refused = await session.attempt(contents[0], temperature=-1)
    data = contents[1][0]["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": NAME_COLOUR}]
    body = {"model": session.model, "messages": [{"role": "user", "content": parts}]}
    try:
        counted = (await session.fetch(COUNT, body))[0].decode(errors="replace")[:80]
    except Refused as error:  # no such address: nothing is affected
        counted = error.reply
    early = await session.cancel_early(contents[2])
    answers = [(index, await session.ask(each)) for index, each in enumerate(contents)]
    what = "answers to images first sent in a refused, a counting and an aborted request"
    detail = f"refused: HTTP {refused.status}; counted: {counted}; aborted: {early}"
    return await session.compare(what, contents, answers, detail, refused.status == 400)


async def system_image(session: Session) -> Verdict:
    """Images belong to user messages; elsewhere they are an error, not a silent drop."""
    image = {"role": "system", "content": [part(disc("red", 120))]}
    messages = [image, {"role": "user", "content": "Hello"}]
    status = (await session.attempt([], messages=messages)).status
    return Verdict(status == 400, "an image in a system message against 400", f"HTTP {status}")


async def accepted(session: Session, made: Callable[[], Iterator[images.Sample]]) -> Verdict:
    """Every image is taken, and costs the tokens that the released transform gives its size."""
    question, what = "What is it?", "each image's status against 200"
    try:
        from vision_exp.preview import unpadded_length as expected

        what += ", its tokens against the released transform's, leading pads apart"
    except ImportError:  # no torch
        expected = None  # type: ignore[assignment]
    base = (await session.ask([question], max_tokens=1)).prompt_tokens
    wrong, seen = [], []
    for name, image, form in made():
        found = await session.attempt([part(image, form), question])
        if isinstance(found, Refused):
            wrong.append(f"{name}: {found.reply}")
            continue
        added = found.prompt_tokens - base
        seen.append(f"{name} {added}")
        # Pads (0 to 3) and the separator between image and text come on top of the block.
        if expected is not None and not 0 <= added - expected(*image.size) <= 5:
            wrong.append(f"{name}: {added} tokens, block {expected(*image.size)}")
    return Verdict(not wrong, what, "; ".join(wrong or seen))


async def positions(session: Session) -> Verdict:
    """Markers on a five by five grid; slope and mean error of the answers along both axes.

    Describing, counting and reading all pass on a server whose image tokens see each other only
    causally; answered coordinates then shrink towards the middle. So the slope is what is judged.
    """
    rows, unreadable = [], []
    for place in itertools.product(PLACES, PLACES):
        x, y = (percent / 100 for percent in place)
        marker = part(disc("red", 7, 896, x, y, 0.03))
        text = (await session.ask([marker, POSITION], max_tokens=24)).text
        if len(numbers := re.findall(r"\d+(?:\.\d+)?", text)) == 2:
            rows.append((*place, *map(float, numbers)))
        else:
            unreadable.append(text)
    columns = list(zip(*rows, strict=True))
    what = "answered positions of a marker against its true ones, slope and error, "
    what += f"{len(rows)} of {len(PLACES) ** 2} places"
    # A whole row or column may be missing from few answers: of that side nothing would be known.
    if len(rows) < 20 or any(len({*column}) < len(PLACES) for column in columns[:2]):
        detail = f"too few places, or none of a whole row or column: {len(unreadable)} unreadable"
        return Verdict(False, what, f"{detail}, as {unreadable[0]!r}")
    good, detail = True, f"{len(unreadable)} unreadable"
    for axis, true, found in zip("xy", columns[:2], columns[2:], strict=True):
        slope = statistics.linear_regression(true, found).slope
        error = statistics.fmean(abs(t - f) for t, f in zip(true, found, strict=True))
        good = good and SLOPES[0] <= slope <= SLOPES[1] and error <= LARGEST_ERROR
        detail += f"; {axis}: slope {slope:.3f}, mean error {error:.1f} %"
    return Verdict(good, what, detail)


class Check(NamedTuple):
    """``needs``: the field of a session that says why it cannot be judged by this, if it cannot."""

    name: str
    run: Run
    needs: str = ""


CHECKS = (
    Check("two concurrent image requests", partial(concurrent, count=2)),
    Check("three concurrent image requests", partial(concurrent, count=3)),
    Check("each request its own image", own_image, "incoherent_reason"),
    Check("the same image twice", same_twice),
    Check("one image at every offset", offsets),
    Check("images in another order", reordered),
    Check("a prefix fork", prefix_fork, "warm_reason"),
    Check("a cancelled request", partial(undisturbed, colour="black", disturb=hang_up)),
    Check("what cancelled requests leave", partial(metrics.left, disturb=hang_up)),
    Check("a bad image, then a good one", partial(undisturbed, colour="white", disturb=send_bad)),
    Check("an image after a request that ended early", unaccepted),
    Check("an image in a system message", system_image),
    Check("images of all shapes", partial(accepted, made=images.shapes)),
    Check("formats and colour modes", partial(accepted, made=images.formats)),
    Check("positions in an image", positions, "incoherent_reason"),
)
