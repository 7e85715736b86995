"""The validator's checks. Each returns a Verdict that says what was compared with what."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vision_exp import validate_pictures as pictures
from vision_exp.validate_client import Client, Refused
from vision_exp.validate_judge import (
    Verdict,
    all_same,
    both,
    judge,
    movement,
    skipped,
    verdict,
)
from vision_exp.validate_reply import Answer
from vision_exp.validate_stream import Cut, cancel, cancel_early

Content = list[dict[str, Any]]
NAME_COLOUR = "What colour is the disc? Answer with one word."
LONG_STORY = "Tell a story about this picture, of at least a thousand words."


@dataclass(frozen=True)
class Lab:
    """The server, and what was found out about it: answers sense, takes ``cache_salt``.

    ``noise``: nats by which answers to one request alone move from repeat to repeat.
    ``senseless``: why content cannot be judged.
    """

    client: Client
    trained: bool
    salts: bool
    noise: float = 0.0
    senseless: str = "the model does not answer sense"

    def same(self, left: Answer, right: Answer) -> tuple[bool | None, str]:
        """Whether two answers are the same, None within the server's own noise; and in words."""
        return judge(left, right, self.noise)

    def ask(self, content: Content, **options: Any) -> Answer:
        return self.client.ask(content, **options)

    def cold(self, content: Content, **options: Any) -> Answer:
        """Asked past the server's prefix cache, where it lets us."""
        salt = uuid.uuid4().hex if self.salts else ""
        return self.client.ask(content, salt=salt, **options)

    def at_once(self, contents: list[Content]) -> list[Answer]:
        with ThreadPoolExecutor(len(contents)) as pool:
            return list(pool.map(self.ask, contents))


def shows(colour: str, seed: int, question: str = NAME_COLOUR) -> Content:
    picture = pictures.part(pictures.disc(colour, seed))
    return [picture, pictures.words(question)]


def own_noise(lab: Lab, requests: int = 3, repeats: int = 4) -> float:
    """The largest movement between answers to one image request, asked alone and cold."""
    moved = 0.0
    for index, colour in enumerate(list(pictures.COLOURS)[:requests]):
        answers = [lab.cold(shows(colour, 200 + index)) for _ in range(repeats)]
        found = [movement(a, b) for i, a in enumerate(answers) for b in answers[:i]]
        moved = max(moved, *found)
    return moved


def concurrent(count: int) -> Callable[[Lab], Verdict]:
    def check(lab: Lab) -> Verdict:
        contents = [shows(c, i + 10 * count) for i, c in enumerate(list(pictures.COLOURS)[:count])]
        together = lab.at_once(contents)
        alone = [lab.cold(content) for content in contents]
        compared = f"{count} image requests at once against each alone"
        return all_same(list(zip(alone, together, strict=True)), compared, lab.noise)

    return check


def own_picture(lab: Lab) -> Verdict:
    compared = "the colour named against the colour drawn, six pictures at once, same question"
    if not lab.trained:
        return skipped(compared, lab.senseless)
    answers = lab.at_once([shows(c, 40 + i) for i, c in enumerate(pictures.COLOURS)])
    wrong = [
        f"{colour} called {answer.text!r}"
        for colour, answer in zip(pictures.COLOURS, answers, strict=True)
        if colour not in answer.text.lower()
    ]
    return verdict(not wrong, compared, "; ".join(wrong) or "all six right")


def same_twice(lab: Lab) -> Verdict:
    one = pictures.part(pictures.disc("red", 60))
    twin = pictures.part(pictures.disc("red", 61))
    question = pictures.words("Describe both pictures.")
    shared, distinct = [one, one, question], [one, twin, question]
    first = lab.ask(shared)
    lengths = (first.prompt_tokens, lab.ask(distinct).prompt_tokens)
    again = lab.ask(shared)
    good, note = lab.same(first, again)
    compared = "one picture twice in a prompt: prompt length as for two, answer as when repeated"
    detail = f"{lengths[0]} and {lengths[1]} prompt tokens; repeated: {note}"
    return verdict(both(good, lengths[0] == lengths[1]), compared, detail)


def offsets(lab: Lab) -> Verdict:
    """The block begins with 0 to 3 pads, so that its grid starts on a multiple of four."""
    picture = pictures.part(pictures.disc("green", 70))
    texts = ["Look" + " at" * count for count in range(8)]
    plain = [lab.ask([pictures.words(t)], max_tokens=1).prompt_tokens for t in texts]
    shown = [lab.ask([pictures.words(t), picture, pictures.words(NAME_COLOUR)]) for t in texts]
    cold = lab.cold([pictures.words(texts[1]), picture, pictures.words(NAME_COLOUR)])
    extra = [a.prompt_tokens - length for a, length in zip(shown, plain, strict=True)]
    fits = any(
        len({e - (c - length) % 4 for e, length in zip(extra, plain, strict=True)}) == 1
        for c in range(4)
    )
    covered = len({length % 4 for length in plain}) == 4
    good, note = lab.same(cold, shown[1])
    compared = (
        "prompt lengths of one picture after eight texts against the rule of the leading pads; "
        "a warm answer against a cold one"
    )
    detail = f"tokens added {extra} after {plain}; {note}"
    if not covered:
        return skipped(compared, f"the texts did not reach all four offsets: {plain}")
    colours = [answer.text for answer in shown if "green" not in answer.text.lower()]
    if lab.trained and colours:
        return verdict(False, compared, f"{detail}; green disc called {colours[0]!r}")
    return verdict(both(fits, good), compared, detail)


def reordered(lab: Lab) -> Verdict:
    red, blue = (pictures.part(pictures.disc(c, 80)) for c in ("red", "blue"))
    question = pictures.words("Name the colours of the discs in order, separated by a comma.")
    first = lab.ask([red, blue, question])
    swapped = lab.ask([blue, red, question])
    again = lab.ask([red, blue, question])
    good, note = lab.same(first, again)
    compared = "two pictures, swapped, and back: the answer to the first order, asked twice"
    detail = f"{note}; {first.text!r} and swapped {swapped.text!r}"
    if lab.trained:
        compared += "; the colours' order against the pictures' order"
        order = [a.text.lower().find("red") < a.text.lower().find("blue") for a in (first, swapped)]
        named = all(c in a.text.lower() for a in (first, swapped) for c in ("red", "blue"))
        good = both(good, named and order == [True, False])
    return verdict(good, compared, detail)


def prefix_fork(lab: Lab) -> Verdict:
    compared = "two questions about one picture, by turns on a shared prefix, against cold answers"
    if not lab.salts:
        return skipped(compared, "the server takes no cache_salt, so no answer is surely cold")
    start = [pictures.words("Study this. " * 60), pictures.part(pictures.disc("yellow", 90))]
    forks = [[*start, pictures.words(q)] for q in (NAME_COLOUR, "What is the shape? One word.")]
    cold = [lab.cold(fork) for fork in forks]
    warm = [lab.ask(forks[index]) for index in (0, 1, 0, 1)]
    return all_same(list(zip([*cold, *cold], warm, strict=True)), compared, lab.noise)


def cancelled(lab: Lab) -> Verdict:
    content = shows("black", 100)
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
    good, note = lab.same(before, lab.ask(content))
    return verdict(good, compared, f"{detail}; {note}")


def _not_cut(cuts: list[Cut]) -> Verdict | None:
    """What is said where a stream was not running when it was hung up on."""
    compared = "two streamed answers: whether they ran when they were hung up on"
    for cut in cuts:
        if cut.error:
            return verdict(False, compared, f"the stream told of an error: {cut.error}")
        if cut.ended and not cut.pieces:
            return verdict(False, compared, f"no piece of an answer came: {cut.ended}")
        if cut.ended:
            return skipped(compared, f"nothing was hung up on: {cut.ended}")
    return None


def bad_then_good(lab: Lab) -> Verdict:
    content = shows("white", 110)
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
    good, note = lab.same(before, lab.ask(content))
    refused = all(400 <= status < 500 for status in statuses.values())
    compared = "the status of two bad images against 4xx; a good answer before and after"
    return verdict(both(good, refused), compared, f"{statuses}; {note}")


def _cut_short() -> bytes:
    import io

    sink = io.BytesIO()
    pictures.disc("red", 111).save(sink, format="PNG")
    return sink.getvalue()[: len(sink.getvalue()) // 2]
