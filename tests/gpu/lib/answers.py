"""What an engine answered, and how far two answers are apart.

Two measures. ``movement`` looks at the few most likely tokens of every step and says which partings
of greedy tokens repeats explain. ``distance`` looks at one step alone, over the same fixed tokens
in every answer: what of the most likely ones two answers happen to share says little, since the
further two answers are apart the fewer they share, and those are the ones that moved least.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

#: Ids of the tokenizer's single bytes, [first, past the last).
BYTE_IDS = (3, 259)
#: The tokens over which answers are compared: the same in every answer, whatever is likely.
PROBED = range(*BYTE_IDS)
#: Tokens of a step that count when the noise of repeats is measured, the most likely ones.
LIKELY = 5


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, each one's log-probabilities by id, and what the prefix cache gave."""

    tokens: list[int]
    choices: list[dict[int, float]]
    cached: int = 0

    @property
    def first(self) -> dict[int, float]:
        return self.choices[0]

    def movement(self, other: Answer) -> float:
        """Largest change, in nats, of the difference between two likely tokens, same prefix before.

        Where two runs part, the difference of the two tokens changed by this much or more. So
        repeats of one request tell which partings their own noise explains.
        """
        moved = 0.0
        for index, (mine, theirs) in enumerate(zip(self.choices, other.choices, strict=True)):
            likely = sorted(mine, key=mine.__getitem__)[-LIKELY:]
            change = [mine[token] - theirs[token] for token in likely if token in theirs]
            if change:
                moved = max(moved, max(change) - min(change))
            if self.tokens[index] != other.tokens[index]:
                break
        return moved

    def explained(self, other: Answer, noise: float) -> tuple[bool, str]:
        """Whether the tokens are equal, or part by no more than ``noise`` nats of movement."""
        for index, (mine, theirs) in enumerate(zip(self.tokens, other.tokens, strict=True)):
            if mine == theirs:
                continue
            rows = (self.choices[index], other.choices[index])
            words = f"token {index} is {mine} or {theirs}"
            if not all(token in row for row in rows for token in (mine, theirs)):
                return False, f"{words}, not among each other's alternatives"
            moved = (rows[0][mine] - rows[0][theirs]) - (rows[1][mine] - rows[1][theirs])
            return moved <= noise, f"{words}, their difference moved {moved:.3f} nats"
        return True, "equal tokens"

    def largest_change(self, other: Answer) -> float:
        """Largest difference of log-probability at the first token, over the ids both list."""
        shared = self.first.keys() & other.first.keys()
        if not shared:
            return float("inf")
        return max(abs(self.first[token] - other.first[token]) for token in shared)


def as_repeated(answer: Answer, repeats: list[Answer], noise: float) -> tuple[bool, str]:
    """Whether an answer's tokens are those of a repeat, or part from one by no more than noise.

    ``noise``: the largest ``movement`` among repeats, in nats.
    """
    known = {tuple(each.tokens) for each in repeats}
    compared = (
        f"{len(repeats)} repeats gave {len(known)} different answers and moved by up to "
        f"{noise:.3f} nats"
    )
    if tuple(answer.tokens) in known:
        return True, f"tokens of one of them; {compared}"
    # The repeat that stays the same the longest says most about where this answer parts.
    good, words = max(answer.explained(each, noise) for each in repeats)
    return good, f"{words}; {compared}"


def noise_of(groups: Iterable[list[Answer]]) -> float:
    """Largest movement between repeats of one request, in nats.

    One noise for all requests: it is a property of the model, and few repeats underrate it.
    """
    return max(one.movement(two) for group in groups for one in group for two in group)


def distance(one: Mapping[int, float], two: Mapping[int, float]) -> float:
    """Root mean square, in nats, of how the log-probabilities of the same tokens moved.

    What all of them moved by together is left out: it is a matter of the tokens not listed.
    Raises ValueError where the two do not list the same tokens.
    """
    if one.keys() != two.keys() or not one:
        raise ValueError(f"{len(one.keys() ^ two.keys())} tokens are listed by one answer only")
    change = [one[token] - two[token] for token in one]
    middle = sum(change) / len(change)
    return math.sqrt(sum((each - middle) ** 2 for each in change) / len(change))


def nearest(row: Mapping[int, float], group: Iterable[Mapping[int, float]]) -> float:
    """Distance to the nearest of a group; infinite where the group is empty."""
    return min((distance(row, each) for each in group), default=math.inf)


def spread(group: Sequence[Mapping[int, float]]) -> float:
    """Largest distance between two of a group."""
    return max((distance(one, two) for one, two in combinations(group, 2)), default=0.0)


def answer_of(output: Any) -> Answer:
    """The answer in one of vLLM's RequestOutputs."""
    completion = output.outputs[0]
    choices = [{t: entry.logprob for t, entry in row.items()} for row in completion.logprobs]
    return Answer(list(completion.token_ids), choices, output.num_cached_tokens or 0)


def save_answers(path: Path, answers: dict[str, Answer]) -> None:
    path.write_text(json.dumps({name: asdict(answer) for name, answer in answers.items()}))


def load_answers(path: Path) -> dict[str, Answer]:
    """What save_answers wrote; JSON made strings of the token ids."""
    found = {}
    for name, entry in json.loads(path.read_text()).items():
        choices = [{int(t): value for t, value in row.items()} for row in entry["choices"]]
        found[name] = Answer(entry["tokens"], choices, entry["cached"])
    return found
