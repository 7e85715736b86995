"""Servers' logs: do the evidence lines of all processes agree, and what else do workers report?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(r"\[vision-exp\] active (?=pid=)(.*)")
_FIELD = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|$)")
#: What a worker says of image rows that its layers did not see, or of a test that was not made.
_TROUBLE = re.compile(
    r"\[vision-exp\] ("
    r"image rows passed unseen .*?\)\."
    r"|the start is refused: image rows .*? on rank [\d, ]*\d"
    r"|the start-up self-test failed: .*"
    r"|VISION_EXP_SELF_TEST=\S+: nothing was tested at start-up)"
)
#: What a process says of something that it does not know.
UNKNOWN = "-"
#: What must be the same in every process that knows it.
AGREE = ("vllm", "plan", "overlay", "routing", "visibility", "eps", "platform")


@dataclass(frozen=True)
class Agreement:
    """`processes`: role of each process; `differences`: what they do not agree on; `plans`:
    beginnings of the plan digests that they name; `causal`: why image tokens do not see each other;
    `troubles`: what workers report of image rows, each once."""

    processes: tuple[str, ...]
    differences: tuple[str, ...]
    plans: tuple[str, ...] = ()
    causal: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether there is evidence, all of it agrees, and no worker reports trouble."""
        return bool(self.processes) and not self.differences and not self.troubles


def read(text: str) -> Agreement:
    """Compare the evidence lines in a log."""
    return read_all([("", text)])


def read_all(logs: Sequence[tuple[str, str]]) -> Agreement:
    """The same over the logs of several nodes, (name, text) each."""
    lines: list[dict[str, str]] = []
    processes: list[str] = []
    differences: list[str] = []
    for name, text in logs:
        found = [dict(_FIELD.findall(match.strip())) for match in _LINE.findall(text)]
        of_log = f"{name}: " if len(logs) > 1 else ""
        if of_log and not found:
            differences.append(f"{name} has no evidence line")
        lines += found
        processes += [
            f"{of_log}{each.get('role', '?')} (pid {each.get('pid', '?')})" for each in found
        ]
    for field in AGREE:
        told: dict[str, list[str]] = {}
        for line, process in zip(lines, processes, strict=True):
            told.setdefault(_value(line, field), []).append(process)
        told.pop(UNKNOWN, None)
        if len(told) > 1:
            listed = "; ".join(f"{value}: {', '.join(who)}" for value, who in told.items())
            differences.append(f"{field} differs: {listed}")
    blind = (line for line in lines if line.get("visibility") == "causal")
    causal = (line.get("reason", "no reason given") for line in blind)
    troubles = (trouble for _, text in logs for trouble in _TROUBLE.findall(text))
    return Agreement(
        tuple(processes),
        tuple(differences),
        tuple(dict.fromkeys(line.get("plan", "") for line in lines)),
        tuple(dict.fromkeys(causal)),
        tuple(dict.fromkeys(troubles)),
    )


def _value(line: dict[str, str], field: str) -> str:
    value = line.get(field, "missing")
    # `visibility=causal reason=...` is one statement.
    return f"{value} {line['reason']}" if field == "visibility" and "reason" in line else value
