"""DSpark drafting on: image requests give the greedy tokens that they give with it off.

    checks_draft.py plain MODEL OUT.json               no drafting: the same request several times
    checks_draft.py draft MODEL OUT.json REPORT.json   with drafting, and what only it has
    checks_draft.py compare PLAIN.json DRAFT.json REPORT.json

The draft runs on the other model runner (V2), so this also is the image path of that runner. Where
tokens part, the movement of the two tokens' difference must be within what repeats without
drafting show.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import checks_reference
from gpu.answers import Answer, as_repeated, load_answers, noise_of, save_answers
from gpu.loading import UNUSED, hash_biases, judge_loading, names_in, watched_loading
from gpu.rig import Engine, Report, Row

#: Numbers of drafted tokens in the order in which they are tried: multiples of the three draft
#: layers, and from 0.26 on no fewer than the checkpoint's block of five.
TRIED = (6, 3)
REPEATS = 8


def plain(folder: str, out: str) -> int:
    engine = Engine(folder)
    asks = checks_reference.asks().items()
    save_answers(
        Path(out),
        {f"{name}#{turn}": engine.cold(ask) for turn in range(REPEATS) for name, ask in asks},
    )
    return 0


def draft(folder: str, out: str, report_path: str) -> int:
    report = Report(Path(report_path))
    with watched_loading() as loads:
        engine, k = start(folder)
    report.add("DSpark: drafted tokens a step", None, f"k={k}")
    names, homeless = names_in(Path(folder)), UNUSED | hash_biases(Path(folder))
    report.run("DSpark: all tensors are loaded", lambda: judge_loading(names, loads, homeless))
    report.run("DSpark: draft layers hold bias_vl", lambda: draft_bias(engine))
    asks = checks_reference.asks().items()
    save_answers(Path(out), {name: engine.cold(ask) for name, ask in asks})
    return 0


def compare(plain_path: str, draft_path: str, report_path: str) -> int:
    """Adds its rows to those of the run with drafting."""
    report = Report(Path(report_path))
    if report.path.exists():
        report.rows = [Row(**row) for row in json.loads(report.path.read_text())]
    repeats: dict[str, list[Answer]] = {}
    for key, answer in load_answers(Path(plain_path)).items():
        repeats.setdefault(key.partition("#")[0], []).append(answer)
    noise = noise_of(repeats.values())
    for name, answer in load_answers(Path(draft_path)).items():
        group = repeats[name]
        report.run(
            f"DSpark, {name}: greedy tokens as without",
            lambda answer=answer, group=group: as_repeated(answer, group, noise),
        )
    return 0


def start(folder: str) -> tuple[Engine, int]:
    """An engine with the first number of drafted tokens that this vLLM's config takes."""
    refused = []
    for k in TRIED:
        speculation = {"method": "dspark", "num_speculative_tokens": k}
        try:
            return Engine(folder, speculative_config=speculation), k
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
