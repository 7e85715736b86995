"""Judges the dumps of `dump_text.py`: same bits, same kernels.

    compare_text.py REPORT.json PATCHED.pt VISION.pt STOCK.pt STOCK_AGAIN.pt...

Stock vLLM is not reproducible on every prompt. A tensor that is equal in all rounds of all stock
processes must have the same bits in every round of the patched tree; the others are counted.
"""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.lib.rig import Report

TREES = ("text checkpoint, patched", "text requests to the vision checkpoint")
#: Prompts of up to 64 rows were reproducible whenever this was run; fewer tensors prove little.
LEAST = 40


def stable(rounds: list[dict[str, Any]]) -> set[str]:
    """Names of the tensors with the same bits in all rounds."""
    first = rounds[0]["tensors"]
    return {
        name
        for name, value in first.items()
        if all(same(value, other["tensors"].get(name)) for other in rounds[1:])
    }


def same(one: torch.Tensor, two: torch.Tensor | None) -> bool:
    return two is not None and one.dtype == two.dtype and torch.equal(one, two)


def control(stock: list[dict[str, Any]], processes: int) -> tuple[bool, str]:
    """Enough of stock is reproducible to assess by; and where it is not."""
    good = stable(stock)
    names = stock[0]["tensors"]
    others = sorted({name.partition("/")[0] for name in names.keys() - good})
    words = (
        f"{len(good)} of {len(names)} tensors equal in {len(stock)} runs of {processes} processes"
    )
    return len(good) >= LEAST, f"{words}; stock differs from itself in: {', '.join(others)}"


def compare(stock: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> tuple[bool, str]:
    assessed = sorted(stable(stock))
    expected = stock[0]["tensors"]
    differ = [
        name
        for name in assessed
        if not all(same(expected[name], found["tensors"].get(name)) for found in rounds)
    ]
    firm = [p for p, t in stock[0]["tokens"].items() if all(r["tokens"][p] == t for r in stock)]
    parted = [p for p in firm if any(r["tokens"][p] != stock[0]["tokens"][p] for r in rounds)]
    rows = sum(expected[name].shape[0] for name in assessed)
    rest = len(expected) - len(assessed)
    words = (
        f"{len(assessed) - len(differ)} of {len(assessed)} tensors ({rows} rows) equal bit for bit "
        f"in {len(rounds)} runs; {rest} not compared, stock differs from itself"
    )
    # A prompt whose hidden states vary may keep its tokens by luck: only fully stable ones count.
    varying = {name.partition("/")[0] for name in expected.keys() - set(assessed)}
    wrong = [prompt for prompt in parted if prompt not in varying]
    if wrong:
        words += f"; tokens differ for {', '.join(wrong)}"
    if differ:
        words += f"; differ: {', '.join(differ[:5])}"
    return bool(assessed) and not differ and not wrong, words


def kernel_lists(stock: list[list[str]], found: list[list[str]]) -> tuple[bool, str]:
    """Equal lists on every stream, whichever of two that start together is named first."""
    count = sum(map(len, stock))
    if sorted(stock) == sorted(found):
        return True, f"{count} launches on {len(stock)} streams, equal in order"
    more, less = changes(stock, found)
    return False, f"{count} launches before; added {brief(more)}; missing {brief(less)}"


def kernels_of_vision(stock: list[list[str]], found: list[list[str]]) -> tuple[bool, str]:
    """A vision model embeds image ids too: plain torch kernels may come on top, nothing else."""
    count = sum(map(len, stock))
    more, less = changes(stock, found)
    foreign = [name for name in more if "at::native" not in name and "Mem" not in name]
    words = f"{count} launches of stock, missing {brief(less)}; added {brief(more)}"
    return not less and not foreign, words + (f"; not torch's own: {foreign[0]}" if foreign else "")


def changes(stock: list[list[str]], found: list[list[str]]) -> tuple[list[str], list[str]]:
    """Launches only in ``found``, and only in ``stock``, stream by stream."""
    more: list[str] = []
    less: list[str] = []
    for one, two in paired(stock, found):
        matcher = difflib.SequenceMatcher(a=one, b=two, autojunk=False)
        for tag, a, b, c, d in matcher.get_opcodes():
            if tag != "equal":
                less += one[a:b]
                more += two[c:d]
    return more, less


def paired(stock: list[list[str]], found: list[list[str]]) -> list[tuple[list[str], list[str]]]:
    """Each stream of ``stock`` with the one of ``found`` that shares most launches with it."""
    rest = list(found)
    pairs: list[tuple[list[str], list[str]]] = []
    for one in sorted(stock, key=len, reverse=True):
        shared = [(Counter(one) & Counter(two)).total() for two in rest]
        pairs.append((one, rest.pop(shared.index(max(shared))) if rest else []))
    return pairs + [([], two) for two in rest]


def brief(names: list[str]) -> str:
    kinds = sorted({name[:90] for name in names})
    return f"{len(names)} ({'; '.join(kinds[:4])})" if names else "none"


def main(report_path: str, patched: str, vision: str, *stock_paths: str) -> int:
    report = Report(Path(report_path))
    dumps = [torch.load(path) for path in stock_paths if Path(path).exists()]
    if len(dumps) < 2:
        report.add("control: stock against itself", False, "fewer than two dumps of stock")
        return 1
    stock = [found for dump in dumps for found in dump["rounds"]]
    report.run("control: stock against itself", lambda: control(stock, len(dumps)))
    lists = dumps[0]["kernels"]
    name = "kernels of a text-only step"
    report.run(f"{name}: stock again", lambda: kernel_lists(lists, dumps[1]["kernels"]))
    for tree, path, assess in zip(
        TREES, (patched, vision), (kernel_lists, kernels_of_vision), strict=True
    ):

        def bits(path: str = path) -> tuple[bool, str]:
            return compare(stock, torch.load(path)["rounds"])

        def launches(path: str = path, assess: Any = assess) -> tuple[bool, str]:
            return assess(lists, torch.load(path)["kernels"])

        report.run(f"{tree}: equals stock bit for bit", bits)
        report.run(f"{name}: {tree}", launches)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
