"""A server's log: do the evidence lines agree, and do workers report image rows gone astray?"""

from __future__ import annotations

import re
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
AGREE = ("vllm", "plan", "overlay", "routing", "visibility", "eps")


@dataclass(frozen=True)
class Agreement:
    """`processes`: role of each process; `differences`: what they do not agree on; `plans`:
    beginnings of the plan digests that they name; `troubles`: what workers report of image rows."""

    processes: tuple[str, ...]
    differences: tuple[str, ...]
    plans: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether there is evidence, all of it agrees, and no worker reports trouble."""
        return bool(self.processes) and not self.differences and not self.troubles


def read(text: str) -> Agreement:
    """Compare the evidence lines in a log."""
    lines = [dict(_FIELD.findall(match.strip())) for match in _LINE.findall(text)]
    processes = tuple(f"{line.get('role', '?')} (pid {line.get('pid', '?')})" for line in lines)
    differences = []
    for field in AGREE:
        told: dict[str, list[str]] = {}
        for line, process in zip(lines, processes, strict=True):
            told.setdefault(_value(line, field), []).append(process)
        told.pop(UNKNOWN, None)
        if len(told) > 1:
            listed = "; ".join(f"{value}: {', '.join(who)}" for value, who in told.items())
            differences.append(f"{field} differs: {listed}")
    plans = dict.fromkeys(line.get("plan", "") for line in lines)
    troubles = dict.fromkeys(_TROUBLE.findall(text))
    return Agreement(processes, tuple(differences), tuple(plans), tuple(troubles))


def _value(line: dict[str, str], field: str) -> str:
    value = line.get(field, "missing")
    # `visibility=causal reason=...` is one statement.
    return f"{value} {line['reason']}" if field == "visibility" and "reason" in line else value
