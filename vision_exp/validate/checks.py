"""The validator's checks that compare answers. Each Verdict says what was compared with what.

Every answer is held against repeats of its request, and against answers to another picture: where
those are no further away, nothing is concluded (`judge`).
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vision_exp.validate import images as pictures
from vision_exp.validate.client import Client, Refused
from vision_exp.validate.judge import (
    Noise,
    Reference,
    Verdict,
    all_same,
    both,
    noise_of,
    skipped,
    verdict,
)
from vision_exp.validate.reply import Answer
from vision_exp.validate.stream import Cut, cancel, cancel_early
from vision_exp.validate.threads import at_once

Content = list[dict[str, Any]]
NAME_COLOUR = "What colour is the disc? Answer with one word."
#: Its answer, too, depends on the picture.
IN_FRENCH = "What colour is the disc? Answer in French, with one word."
LONG_STORY = "Tell a story about this picture, of at least a thousand words."
#: Answers to a request alone, and to the same request with another picture.
REPEATS, CONTROLS = 3, 2


@dataclass(frozen=True)
class Lab:
    """The server, and what was found out about it: answers sense, takes ``cache_salt``.

    ``noise``: of answers to one request alone. ``senseless``: why content cannot be judged.
    """

    client: Client
    trained: bool
    salts: bool
    noise: Noise = field(default_factory=Noise)
    senseless: str = "the model does not answer sense"

    def ask(self, content: Content, **options: Any) -> Answer:
        return self.client.ask(content, **options)

    def cold(self, content: Content, **options: Any) -> Answer:
        """Asked with a fresh ``cache_salt``, where the server takes one.

        vLLM then passes its prefix cache; that another server does cannot be seen from here.
        """
        salt = uuid.uuid4().hex if self.salts else ""
        return self.client.ask(content, salt=salt, **options)

    def at_once(self, contents: list[Content]) -> list[Answer]:
        return at_once([partial(self.cold, content) for content in contents])

    def reference(self, content: Content, other: Content) -> Reference:
        """What ``content`` is answered alone; ``other`` is the same with another picture."""
        alone = [self.cold(content) for _ in range(REPEATS)]
        return Reference(alone, [self.cold(other) for _ in range(CONTROLS)])

    def compare(
        self,
        pairs: list[tuple[Answer, Reference]],
        compared: str,
        *,
        also: bool = True,
        detail: str = "",
    ) -> Verdict:
        """Passed only if every answer is its reference's and ``also`` is true."""
        good, note = all_same(pairs, self.noise)
        if self.salts:
            compared += " (alone or cold: asked with a fresh cache_salt, which vLLM honours)"
        else:
            compared += " (without cache_salt, so any answer may be from the server's cache)"
        return verdict(both(good, also), compared, f"{detail}; {note}" if detail else note)


def shows(colour: str, seed: int, question: str = NAME_COLOUR) -> Content:
    picture = pictures.part(pictures.disc(colour, seed))
    return [picture, pictures.words(question)]


def own_noise(lab: Lab, requests: int = 3, repeats: int = 4) -> Noise:
    """How answers to one image request, asked alone and cold, move from repeat to repeat."""
    noise = Noise()
    for index, colour in enumerate(list(pictures.COLOURS)[:requests]):
        content = shows(colour, 200 + index)
        noise += noise_of([lab.cold(content) for _ in range(repeats)])
    return noise


def concurrent(count: int) -> Callable[[Lab], Verdict]:
    def check(lab: Lab) -> Verdict:
        contents = [shows(c, i + 10 * count) for i, c in enumerate(list(pictures.COLOURS)[:count])]
        together = lab.at_once(contents)
        alone = [[lab.cold(content) for _ in range(REPEATS)] for content in contents]
        references = [
            Reference(mine, [a for other in alone if other is not mine for a in other])
            for mine in alone
        ]
        compared = f"{count} image requests at once against each alone, three times"
        return lab.compare(list(zip(together, references, strict=True)), compared)

    return check


def own_picture(lab: Lab) -> Verdict:
    compared = "the colour named against the colour drawn, six pictures at once, same question"
    if not lab.trained:
        return skipped(compared, lab.senseless)
    answers = lab.at_once([shows(c, 40 + i) for i, c in enumerate(pictures.COLOURS)])
    wrong = [
        f"{colour} called {answer.text!r}"
        for colour, answer in zip(pictures.COLOURS, answers, strict=True)
        if pictures.colours_named(answer.text) != [colour]
    ]
    return verdict(not wrong, compared, "; ".join(wrong) or "all six right")


def same_twice(lab: Lab) -> Verdict:
    one, twin = (pictures.part(pictures.disc("red", seed)) for seed in (60, 61))
    other = pictures.part(pictures.disc("blue", 60))
    question = pictures.words("Which colours do the discs in the two pictures have?")
    shared = lab.ask([one, one, question])
    lengths = (shared.prompt_tokens, lab.ask([one, twin, question]).prompt_tokens)
    single = lab.ask([one, question], max_tokens=1).prompt_tokens
    again = lab.ask([one, one, question])
    reference = lab.reference([one, one, question], [other, other, question])
    return lab.compare(
        [(shared, reference), (again, reference)],
        "one picture twice in a prompt: prompt length as for two, and more than for one; "
        "answers as when asked cold",
        also=lengths[0] == lengths[1] > single,
        detail=f"{lengths[0]} and {lengths[1]} prompt tokens, with one picture {single}",
    )


def offsets(lab: Lab) -> Verdict:
    """The block begins with 0 to 3 pads, so that its grid starts on a multiple of four."""
    green, red = (pictures.part(pictures.disc(colour, 70)) for colour in ("green", "red"))
    question = pictures.words(NAME_COLOUR)
    texts = [pictures.words("Look" + " at" * count) for count in range(8)]
    plain = [lab.ask([text], max_tokens=1).prompt_tokens for text in texts]
    shown = [lab.ask([text, green, question]) for text in texts]
    extra = [a.prompt_tokens - length for a, length in zip(shown, plain, strict=True)]
    fits = any(
        len({e - (c - length) % 4 for e, length in zip(extra, plain, strict=True)}) == 1
        for c in range(4)
    )
    compared = (
        "prompt lengths of one picture after eight texts against the rule of the leading pads; "
        "a warm answer against cold ones"
    )
    if len({length % 4 for length in plain}) != 4:
        return skipped(compared, f"the texts did not reach all four offsets: {plain}")
    detail = f"tokens added {extra} after {plain}"
    wrong = [a.text for a in shown if pictures.colours_named(a.text) != ["green"]]
    if lab.trained and wrong:
        return verdict(False, compared, f"{detail}; green disc called {wrong[0]!r}")
    reference = lab.reference([texts[1], green, question], [texts[1], red, question])
    return lab.compare([(shown[1], reference)], compared, also=fits, detail=detail)


def reordered(lab: Lab) -> Verdict:
    red, blue = (pictures.part(pictures.disc(c, 80)) for c in ("red", "blue"))
    question = pictures.words("Name the colours of the discs in order, separated by a comma.")
    first = lab.ask([red, blue, question])
    swapped = lab.ask([blue, red, question])
    again = lab.ask([red, blue, question])
    reference = lab.reference([red, blue, question], [blue, red, question])
    swapped_reference = Reference(reference.others, reference.alone)
    compared = "two pictures, swapped, and back: each answer against its order's, asked cold"
    named = True
    if lab.trained:
        compared += "; the colours' order against the pictures' order"
        order = [pictures.colours_named(answer.text) for answer in (first, swapped)]
        named = order == [["red", "blue"], ["blue", "red"]]
    return lab.compare(
        [(first, reference), (again, reference), (swapped, swapped_reference)],
        compared,
        also=named,
        detail=f"{first.text!r} and swapped {swapped.text!r}",
    )


def prefix_fork(lab: Lab) -> Verdict:
    compared = "two questions about one picture, by turns on a shared prefix, against cold answers"
    if not lab.salts:
        return skipped(compared, "the server takes no cache_salt, so no answer is surely cold")
    study = pictures.words("Study this. " * 60)
    yellow, red = ([study, *shows(colour, 90)[:1]] for colour in ("yellow", "red"))
    questions = [pictures.words(NAME_COLOUR), pictures.words(IN_FRENCH)]
    asked = [lab.reference([*yellow, question], [*red, question]) for question in questions]
    # Where both questions have one answer, a mixed-up one could not be told.
    cold = [
        Reference(mine.alone, mine.others + other.alone, "another picture or the other question")
        for mine, other in (asked, reversed(asked))
    ]
    warm = [lab.ask([*yellow, questions[index]]) for index in (0, 1, 0, 1)]
    return lab.compare(list(zip(warm, [*cold, *cold], strict=True)), compared)


def cancelled(lab: Lab) -> Verdict:
    content = shows("black", 100)
    reference = lab.reference(content, shows("red", 100))
    before = lab.ask(content)
    cuts = [cancel(lab.client, shows("white", seed, LONG_STORY)) for seed in (101, 102)]
    early = cancel_early(lab.client, shows("white", 103, LONG_STORY))
    compared = "an answer before and after two running answers were hung up on"
    problem = _not_cut(cuts)
    if problem:
        return problem
    detail = f"hung up after {cuts[0].pieces} and {cuts[1].pieces} pieces"
    if early.pieces or early.ended or early.error:
        detail += f", none before its first ({early.error or early.ended or 'it had come'})"
    else:
        compared += ", and a third before its first token"
    pairs = [(before, reference), (lab.ask(content), reference)]
    return lab.compare(pairs, compared, detail=detail)


def _not_cut(cuts: list[Cut]) -> Verdict | None:
    """What is said where a stream was not running when it was hung up on."""
    compared = "two streamed answers: whether they ran when they were hung up on"
    for cut in cuts:
        if cut.error:
            return verdict(False, compared, f"the stream went wrong: {cut.error}")
        if cut.ended and not cut.pieces:
            return verdict(False, compared, f"no piece of an answer came: {cut.ended}")
        if cut.ended:
            return skipped(compared, f"nothing was hung up on: {cut.ended}")
    return None


def bad_then_good(lab: Lab) -> Verdict:
    content = shows("white", 110)
    reference = lab.reference(content, shows("red", 110))
    before = lab.ask(content)
    broken = {
        "no image": pictures.raw_part(b"this is no image", "image/png"),
        "cut short": pictures.raw_part(_cut_short(), "image/png"),
    }
    statuses = {}
    for name, part in broken.items():
        try:
            lab.ask([part, pictures.words(NAME_COLOUR)])
            statuses[name] = 200
        except Refused as error:
            statuses[name] = error.status
    return lab.compare(
        [(before, reference), (lab.ask(content), reference)],
        "the status of two bad images against 4xx; a good answer before and after",
        also=all(400 <= status < 500 for status in statuses.values()),
        detail=f"{statuses}",
    )


def _cut_short() -> bytes:
    sink = io.BytesIO()
    pictures.disc("red", 111).save(sink, format="PNG")
    return sink.getvalue()[: len(sink.getvalue()) // 2]
