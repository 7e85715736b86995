"""Answers of one engine to the standard prompts, and of another engine beside them.

Both have a text twin for every prompt with images, and what must answer differently: the same
prompt with other images, and with image rows causal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu.jobs.checks_reference import asks, twins
from gpu.jobs.checks_visibility import causal
from gpu.lib.answers import Answer, noise_of
from gpu.lib.equivalence import Runs, nearness, same_answers
from gpu.lib.rig import Ask, Engine, random_image

#: Runs of what must answer differently.
OTHERS = 2
OTHER_IMAGE, FEATURE_OFF = "another image", "feature off"


@dataclass
class Group:
    """Cold answers to one prompt, and those to what must answer differently, by its name."""

    cold: list[Answer] = field(default_factory=list)
    others: dict[str, list[Answer]] = field(default_factory=dict)


def cold_answers(engine: Engine, repeats: int) -> dict[str, Answer]:
    """All answers, as `grouped` wants them; of `probed` engines alone can they be assessed."""
    found: dict[str, Answer] = {}

    def take(name: str, ask: Ask, times: int) -> None:
        found.update({f"{name}#{index}": engine.cold(ask) for index in range(times)})

    for name, ask in (asks() | twins()).items():
        take(name, ask, repeats)
        if not ask.images:
            continue
        swapped = tuple(random_image(*each.size, seed=77 + i) for i, each in enumerate(ask.images))
        take(f"{name}/{OTHER_IMAGE}", Ask(ask.ids, swapped), OTHERS)
        with causal(engine):
            take(f"{name}/{FEATURE_OFF}", ask, OTHERS)
    return found


def grouped(answers: Mapping[str, Answer]) -> dict[str, Group]:
    """By prompt; keys are PROMPT#n and PROMPT/CONTROL#n."""
    groups: dict[str, Group] = {}
    for key, answer in answers.items():
        name, _, control = key.partition("#")[0].partition("/")
        group = groups.setdefault(name, Group())
        (group.others.setdefault(control, []) if control else group.cold).append(answer)
    return groups


def beside(
    name: str, groups: Mapping[str, Group], treated: Mapping[str, Sequence[Answer]]
) -> tuple[bool, str]:
    """Whether the treated answers to one prompt are its cold ones, first and second token.

    The first comes from a prefill, the second from a decode step. The controls are held against the
    first: what follows another first token has no distance.
    """
    texts = [each for each, group in groups.items() if not group.others]
    noise = noise_of(groups[each].cold for each in texts)
    cold = groups[name].cold
    distances = {what: nearness(cold, found) for what, found in groups[name].others.items()}
    good, words = True, []
    for at, token in enumerate(("first token", "second token")):
        runs = {
            each: beginning_alike(group.cold, treated[each], at) for each, group in groups.items()
        }
        if not runs[name].treated:
            return False, f"no answer begins like one of {len(cold)} cold ones"
        text_runs = [runs[each] for each in texts if runs[each].treated]
        same, detail = same_answers([runs[name]], text_runs, distances if at == 0 else {}, noise)
        good = good and same
        words.append(f"{token} of {len(runs[name].treated)} answers: {detail}")
    return good, "; ".join(words)


def beginning_alike(cold: Sequence[Answer], treated: Sequence[Answer], at: int) -> Runs:
    """Those of the treated answers whose first ``at`` tokens a cold one has too."""
    known = {tuple(each.tokens[:at]) for each in cold}
    return Runs(cold, [each for each in treated if tuple(each.tokens[:at]) in known], at)
