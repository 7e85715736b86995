"""DSpark drafting on: image requests give the greedy tokens that they give with it off.

    checks_draft.py plain MODEL OUT.json               no drafting: the same requests several times
    checks_draft.py draft MODEL OUT.json REPORT.json   with drafting, and what only it has
    checks_draft.py compare PLAIN.json DRAFT.json REPORT.json

The draft runs on the other model runner (V2), so this also is the image path of that runner. Random
weights draft what the model never accepts, so every prompt is asked once more with an earlier
answer offered as the draft, one token of it changed: then tokens are accepted, and one is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.jobs.checks_reference import asks, twins
from gpu.lib.answers import PROBED, Answer, load_answers, save_answers
from gpu.lib.controls import beside, cold_answers, grouped
from gpu.lib.loading import (
    assess_loading,
    hash_biases,
    names_in,
    unused_by_draft,
    watched_loading,
)
from gpu.lib.rig import Engine, Report, Row, replaced

#: Numbers of drafted tokens in the order in which they are tried: multiples of the three draft
#: layers, and from 0.26 on no fewer than the checkpoint's block of five.
TRIED = (6, 3)
REPEATS = 8
#: The token of an offered answer that is changed.
CHANGED = 4


def plain(folder: str, out: str) -> int:
    save_answers(Path(out), cold_answers(Engine(folder, probed=True), REPEATS))
    return 0


def draft(folder: str, out: str, report_path: str) -> int:
    report = Report(Path(report_path))
    with watched_loading() as loads:
        engine, k = start(folder)
    report.add("DSpark: drafted tokens a step", None, f"k={k}")
    import vllm.models.deepseek_v4.nvidia.dspark as dspark

    unused = unused_by_draft(Path(dspark.__file__).read_text())
    names, homeless = names_in(Path(folder)), unused | hash_biases(Path(folder))
    report.run("DSpark: all tensors are loaded", lambda: assess_loading(names, loads, homeless))
    report.run("DSpark: draft layers hold bias_vl", lambda: draft_bias(engine))
    answers: dict[str, Answer] = {}
    drafted = {"its own": Drafted(), "an earlier answer": Drafted()}
    for name, ask in (asks() | twins()).items():
        with counted(engine, drafted["its own"]):
            answers[f"{name}#own"] = own = engine.cold(ask)
        with counted(engine, drafted["an earlier answer"]), offering(engine, own.tokens):
            answers[f"{name}#offered"] = engine.cold(ask)
    save_answers(Path(out), answers)
    report.run("DSpark: drafted tokens are accepted and refused", lambda: both_ways(drafted))
    return 0


class Drafted:
    """Tokens that the model was given to verify, and those of them that it took."""

    offered = accepted = 0


@contextmanager
def counted(engine: Engine, drafted: Drafted) -> Iterator[None]:
    tell = engine.scheduler.make_spec_decoding_stats

    def counting(*args: Any, **kwargs: Any) -> Any:
        drafted.offered += kwargs["num_draft_tokens"]
        drafted.accepted += kwargs["num_accepted_tokens"]
        return tell(*args, **kwargs)

    with replaced(engine.scheduler, "make_spec_decoding_stats", counting):
        yield


@contextmanager
def offering(engine: Engine, answer: Sequence[int]) -> Iterator[None]:
    """Drafts ``answer`` for the one request that runs, with token `CHANGED` another one."""
    speculator = engine.runner.speculator
    propose, given = speculator.propose, list(answer)
    given[CHANGED] = next(token for token in PROBED if token != answer[CHANGED])
    sampled = 0

    def proposed(*args: Any, **kwargs: Any) -> Any:
        nonlocal sampled
        drafts = propose(*args, **kwargs)
        sampled += int(args[5][0])  # num_sampled, of this step
        rest = given[sampled : sampled + drafts.shape[1]]
        drafts[0, : len(rest)] = drafts.new_tensor(rest)
        return drafts

    with replaced(speculator, "propose", proposed):
        yield


def both_ways(drafted: dict[str, Drafted]) -> tuple[bool, str]:
    words = (f"of {name} {d.accepted} of {d.offered} accepted" for name, d in drafted.items())
    offered = drafted["an earlier answer"]
    good = drafted["its own"].offered > 0 and 0 < offered.accepted < offered.offered
    return good, ", ".join(words)


def compare(plain_path: str, draft_path: str, report_path: str) -> int:
    """Adds its rows to those of the run with drafting."""
    report = Report(Path(report_path))
    if report.path.exists():
        report.rows = [Row(**row) for row in json.loads(report.path.read_text())]
    groups = grouped(load_answers(Path(plain_path)))
    drafted = grouped(load_answers(Path(draft_path)))
    for name in asks():

        def check(name: str = name) -> tuple[bool, str]:
            return beside(name, groups, {each: group.cold for each, group in drafted.items()})

        report.run(f"DSpark, {name}: greedy tokens as without", check)
    return 0


def start(folder: str) -> tuple[Engine, int]:
    """An engine with the first number of drafted tokens that this vLLM's config takes."""
    refused = []
    for k in TRIED:
        speculation = {"method": "dspark", "num_speculative_tokens": k}
        try:
            return Engine(folder, probed=True, speculative_config=speculation), k
        except ValueError as error:
            if "num_speculative_tokens" not in str(error):
                raise
            refused.append(f"{k}: {error}")
    raise ValueError("; ".join(refused))


def draft_bias(engine: Engine) -> tuple[bool, str]:
    speculator = engine.runner.speculator
    names = [n for n, _ in speculator.model.named_parameters() if n.endswith("_bias_vl")]
    return len(names) == 3, f"{len(names)} parameters: {', '.join(names)}"


if __name__ == "__main__":
    verbs = {"plain": plain, "draft": draft, "compare": compare}
    sys.exit(verbs[sys.argv[1]](*sys.argv[2:]))
