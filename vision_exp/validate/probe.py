"""The coordinate probe: do answered positions follow true ones?

Describing, counting and reading all pass on a server whose image tokens see each other only
causally; answered coordinates then shrink towards the middle. So the slope is what is judged.
"""

from __future__ import annotations

import re

from vision_exp.validate import images as pictures
from vision_exp.validate.checks import Lab
from vision_exp.validate.judge import Verdict, skipped, slope, verdict

PLACES = (0.1, 0.3, 0.5, 0.7, 0.9)
QUESTION = (
    "The picture has one small red disc. Where is its centre? Answer with two whole numbers only: "
    "x in percent of the width from the left, then y in percent of the height from the top."
)
#: Slopes of a working server were reported near 0.98, of a causal one near 0.3.
SLOPES = (0.85, 1.15)
LARGEST_ERROR = 8.0


def coordinates(lab: Lab) -> Verdict:
    """Markers on a five by five grid; slope and mean error of the answers along both axes."""
    compared = "answered positions of a marker against its true ones, slope and error"
    if not lab.trained:
        return skipped(compared, lab.senseless)
    told: list[tuple[float, float, float, float]] = []
    unreadable = []
    for y in PLACES:
        for x in PLACES:
            content = [pictures.part(pictures.marker(x, y)), pictures.words(QUESTION)]
            text = lab.ask(content, max_tokens=24).text
            numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]
            if len(numbers) == 2:
                told.append((100 * x, 100 * y, numbers[0], numbers[1]))
            else:
                unreadable.append(text)
    places = len(PLACES) ** 2
    compared += f", {len(told)} of {places} places"
    # A whole row or column may be missing from few answers: of that side nothing would be known.
    if len(told) < 20 or any(len({each[axis] for each in told}) < len(PLACES) for axis in (0, 1)):
        words = f"too few places, or none of a whole row or column: {places - len(told)} unreadable"
        return verdict(False, compared, f"{words}, as {unreadable[0]!r}")
    true_x, true_y, told_x, told_y = (list(column) for column in zip(*told, strict=True))
    slopes = slope(true_x, told_x), slope(true_y, told_y)
    errors = [
        sum(abs(t - a) for t, a in zip(true, answers, strict=True)) / len(told)
        for true, answers in ((true_x, told_x), (true_y, told_y))
    ]
    good = all(SLOPES[0] <= s <= SLOPES[1] for s in slopes) and max(errors) <= LARGEST_ERROR
    detail = (
        f"slope x {slopes[0]:.3f}, y {slopes[1]:.3f}; mean error x {errors[0]:.1f} %, "
        f"y {errors[1]:.1f} %; {len(unreadable)} unreadable"
    )
    return verdict(good, compared, detail)
