"""What documents say about sites and releases: the table of docs/reference.md, and sentences.

`python3 -m anchors.drift.update` writes both. A sentence is found by its words, so that a reader
meets no marks in a document; one that is not there exactly once is an error, which names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from anchors.releases import known
from anchors.sites import all_anchors

README = "README.md"
REFERENCE = "docs/reference.md"
LIMITS = "docs/limits.md"
BEGIN = "<!-- anchor table: written by python3 -m anchors.drift.update -->"
END = "<!-- end of the anchor table -->"


@dataclass(frozen=True)
class Sentence:
    """Words of a file whose one group is the place of a release, and what to write there."""

    file: str
    words: str
    release: Callable[[], str]


def sentences() -> tuple[Sentence, ...]:
    """Every place outside `known.py` that names the first or the last release of a kind."""
    recipes = [
        f"recipes/{launcher}/deepseek-v4-flash-vision-exp-hotfix.yaml"
        for launcher in ("eugr", "sparkrun")
    ]
    return (
        Sentence(README, r"\nvLLM (\S+) to \S+ stops at one of the", _first_in_full),
        Sentence(README, r"\nvLLM \S+ to (\S+) stops at one of the", known.newest),
        Sentence(README, r"vLLM (\S+) and later serves the model", _first_native),
        Sentence(README, r"with vLLM (\S+) to \S+, or a fork", _first_in_full),
        Sentence(README, r"with vLLM \S+ to ([^ ,]+), or a fork", known.newest),
        Sentence(
            "docs/limits.md", r"native support in vLLM (\S+) and later", _minor(_first_native)
        ),
        Sentence(README, r"judges every release from (\S+) on", _oldest),
        Sentence("anchors/engine/assess.py", r"use vLLM (\S+) or later", _oldest),
        *(
            Sentence(file, words, _minor(release))
            for file in recipes
            for words, release in (
                (r"whose vLLM \((\S+) to \S+\) is text-only", _first_in_full),
                (r"whose vLLM \(\S+ to ([^ )]+)\) is text-only", known.newest),
            )
        ),
    )


def _oldest() -> str:
    return known.versions()[0]


def _first_in_full() -> str:
    return known.versions(known.WITH_DSPARK)[0]


def _first_native() -> str:
    return known.versions(known.NATIVE)[0]


def _minor(release: Callable[[], str]) -> Callable[[], str]:
    """The release without its last number."""
    return lambda: release().rpartition(".")[0]


def rendered(file: str, text: str, applies: Mapping[str, list[str]]) -> str:
    """A document as it should be; `applies`: site -> releases where it was seen to apply.

    Raises ValueError where a sentence or a marker of the table is not there exactly once.
    """
    for sentence in sentences():
        if sentence.file == file:
            found = list(re.finditer(sentence.words, text))
            if len(found) != 1:
                raise ValueError(
                    f"{file} has {len(found)} instead of one of: {sentence.words} "
                    "(anchors/drift/documents.py)"
                )
            start, stop = found[0].span(1)
            text = text[:start] + sentence.release() + text[stop:]
    return _with_table(text, applies) if file == REFERENCE else text


def _with_table(text: str, applies: Mapping[str, list[str]]) -> str:
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{REFERENCE} needs the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{table(applies)}\n{END}{tail}"


def table(applies: Mapping[str, list[str]]) -> str:
    """Each site, its file, what is done there, where it was seen to hold, as Markdown."""
    lines = [
        "| site | file in `vllm/` | what | applies to (checked) | until |",
        "|---|---|---|---|---|",
    ]
    for anchor in all_anchors():
        seen = applies.get(anchor.id)
        where = f"{seen[0]} to {seen[-1]}" if seen else ""
        cells = (f"`{anchor.id}`", f"`{anchor.file}`", anchor.what, where, anchor.until)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
