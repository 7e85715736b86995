"""When a run under some treatment counts as the same answer as cold runs of the same prompt.

vLLM's routed experts make repeats of one cold prompt differ, so a treated run is held against
several cold repeats of its own prompt. It passes if its tokens are those of one of them, or part as
repeats of text part, and if its distance to the nearest of them is at most what text moves by: the
largest distance between two cold repeats of a text of the same length, or that of the text itself
under the same treatment to the nearest of its cold repeats. How far the image's own repeats are
apart is printed and excuses nothing. Where a prompt that must not give the same answer, with
another image or with image rows causal, is within that limit, nothing can be concluded: that fails
too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpu.lib.answers import Answer, as_repeated, nearest, spread

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Run:
    """A treated run: its answer, images encoded in it, and what its steps prefilled."""

    answer: Answer
    encoded: int = 0
    #: Positions [start, stop) that each step computed of the prompt, in order.
    ranges: Ranges = ()
    #: The prompt's image blocks, leading pads included, as [start, stop).
    blocks: Ranges = ()


#: Says of the runs with the image, and with the text twin, whether they are what a row names.
Needs = Callable[[Sequence[Run], Sequence[Run]], tuple[bool, str]]


@dataclass(frozen=True)
class Runs:
    """Answers to one prompt: cold repeats, and those under a treatment.

    Token ``at`` is compared, with the repeats that agree on what comes before it.
    """

    cold: Sequence[Answer]
    treated: Sequence[Answer]
    at: int = 0

    def moved(self) -> float:
        """Largest distance of a treated run to the nearest cold one."""
        return max(self._nearest(each) for each in self.treated)

    def spread(self) -> float:
        """Largest distance between two cold runs."""
        rows: dict[tuple[int, ...], list[Mapping[int, float]]] = {}
        for each in self.cold:
            rows.setdefault(tuple(each.tokens[: self.at]), []).append(each.choices[self.at])
        return max(map(spread, rows.values()), default=0.0)

    def _nearest(self, answer: Answer) -> float:
        known = [each for each in self.cold if each.tokens[: self.at] == answer.tokens[: self.at]]
        return nearest(answer.choices[self.at], (each.choices[self.at] for each in known))


def same_answers(
    images: Sequence[Runs],
    texts: Sequence[Runs],
    controls: Mapping[str, float],
    noise: float,
) -> tuple[bool, str]:
    """The module's criterion for all ``images``, by what the ``texts`` move by.

    ``controls``: distances that other answers have to the nearest cold run. ``noise``: largest
    movement among cold repeats of texts.
    """
    verdicts = [as_repeated(a, list(runs.cold), noise) for runs in images for a in runs.treated]
    moved = max(runs.moved() for runs in images)
    cold, warm = (max(found) for found in zip(*map(_of_text, texts), strict=True))
    limit = max(cold, warm)
    own = max(runs.spread() for runs in images)
    words = (
        f"{min(verdicts)[1]}; {moved:.3f} from the nearest cold run, text {warm:.3f}, cold repeats "
        f"of text up to {cold:.3f} apart (of the image {own:.3f}); "
        + ", ".join(f"{name} {value:.3f}" for name, value in controls.items())
    )
    if limit >= min(controls.values(), default=math.inf):
        return False, f"undecidable, a control is as near as text moves: {words}"
    return all(good for good, _ in verdicts) and moved <= limit, words


def _of_text(text: Runs) -> tuple[float, float]:
    return text.spread(), text.moved()


def nearness(cold: Sequence[Answer], others: Sequence[Answer]) -> float:
    """How near runs that must not give the same answer come to the cold ones, first token."""
    rows = [each.first for each in cold]
    return min(nearest(each.first, rows) for each in others)


def both(*needs: Needs) -> Needs:
    """All of them, in words one after the other."""

    def needed(images: Sequence[Run], texts: Sequence[Run]) -> tuple[bool, str]:
        found = [need(images, texts) for need in needs]
        return all(good for good, _ in found), "; ".join(words for _, words in found)

    return needed


def encodes(times: int) -> Needs:
    """In every run ``times`` images go through the tower; none with text."""

    def needed(images: Sequence[Run], texts: Sequence[Run]) -> tuple[bool, str]:
        counts = [run.encoded for run in images]
        good = all(count == times for count in counts) and not any(run.encoded for run in texts)
        return good, f"encoder ran {_listed(counts)} times, {times} wanted"

    return needed


def hits(image: int, text: int, where: str) -> Needs:
    """Cached tokens of every run. ``where`` text's hit ends: before, inside or after the block.

    A hit that would end inside a block is cut back to before it: text, which has no block there,
    shows where it would have ended. From 0.29 on text keeps nothing at a boundary inside a prompt,
    which the image's block does.
    """

    def needed(images: Sequence[Run], texts: Sequence[Run]) -> tuple[bool, str]:
        ((start, stop),) = {block for run in images for block in run.blocks}
        mine, theirs = ({run.answer.cached for run in runs} for runs in (images, texts))
        place = "before" if text <= start else "inside" if text < stop else "after"
        outside = not any(start < count < stop for count in mine)
        words = (
            f"{_listed(mine)} cached tokens ({image} wanted), of the text {_listed(theirs)} "
            f"({text} wanted); the image lies at {start} to {stop}"
        )
        usual = theirs == {text} or (place == "before" and theirs == {0})
        return mine == {image} and usual and place == where and outside, words

    return needed


def unsplit(size: int) -> Needs:
    """Steps of ``size`` tokens, which cut the text inside the image's block, not the image."""

    def needed(images: Sequence[Run], texts: Sequence[Run]) -> tuple[bool, str]:
        ((start, stop),) = {block for run in images for block in run.blocks}
        text = all(run.ranges[0] == (0, size) for run in texts)
        total = texts[0].ranges[-1][1]
        image = all(
            run.ranges[0] == (0, start) and covers(run.ranges) and run.ranges[-1][1] == total
            for run in images
        )
        words = (
            f"steps {_steps(images[0].ranges)} with the image at {start} to {stop}, text "
            f"{_steps(texts[0].ranges)}"
        )
        return text and image and start < size < stop and whole(images), words

    return needed


def restarted(after: int, total: int) -> Needs:
    """A first step up to ``after``, then from the start again, all ``total`` tokens, no split."""

    def needed(images: Sequence[Run], texts: Sequence[Run]) -> tuple[bool, str]:
        good = all(run.ranges[0] == (0, after) and covers(run.ranges[1:]) for run in images)
        good = good and all(run.ranges[-1][1] == total for run in images) and whole(images)
        return good, f"steps {_steps(images[0].ranges)}"

    return needed


def covers(ranges: Ranges) -> bool:
    """Whether the steps follow each other without a gap, from position 0."""
    return [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]


def whole(runs: Iterable[Run]) -> bool:
    """Whether no step of a run starts or ends inside one of its blocks, and there are blocks."""
    return all(
        run.blocks
        and not any(
            start < edge < stop
            for start, stop in run.blocks
            for step in run.ranges
            for edge in step
        )
        for run in runs
    )


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in values)


def _steps(ranges: Ranges) -> str:
    return ", ".join(f"{start}-{stop}" for start, stop in ranges)
