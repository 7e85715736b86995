"""Which rows the installed FlashInfer's SM12x sparse MLA takes, read from its sources.

Its decode kernel runs image rows and DSpark's draft rows. FlashInfer says which (heads, keys) it is
built for in `_DECODE_DSV4_DISPATCH`: no such table up to 0.6.13, a set of pairs from 0.6.14 to
0.6.18, and from 0.7 on a rule that takes any number of keys, in one file or another.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass

from anchors.digests import read_file

TABLE = "_DECODE_DSV4_DISPATCH"
_PLACES = (
    "flashinfer/mla/_sparse_mla_sm120.py",
    "flashinfer/mla/_sparse_mla_sm120_plan.py",
    "flashinfer/mla/_sparse_mla_sm120/_policy.py",
)
_NAME = re.compile(r"flashinfer_python-([^-]+)\.dist-info")


#: The module that vLLM and the start of this hotfix ask for the table.
ASKED = "flashinfer/mla/_sparse_mla_sm120"


@dataclass(frozen=True)
class FlashInfer:
    """`version`: empty if not installed. `pairs`: (heads, keys) with a kernel; None with a rule.

    `form`: "none" (no such kernels), "pairs", "rule", or "unknown".
    """

    version: str
    form: str
    pairs: frozenset[tuple[int, int]] | None = None

    def takes(self, heads: tuple[int, ...], keys: int) -> bool | None:
        """Whether every number of heads has a kernel for rows of `keys`; None: not known."""
        if self.form == "unknown":
            return None
        if self.pairs is None:
            return self.form == "rule"
        return all((each, keys) in self.pairs for each in heads)


def installed(site_packages: str) -> FlashInfer:
    """The FlashInfer beside a vLLM."""
    names = os.listdir(site_packages) if os.path.isdir(site_packages) else []
    found = [match[1] for match in map(_NAME.fullmatch, sorted(names)) if match]
    version = found[-1] if found else ""
    sources = [read_file(os.path.join(site_packages, place)) for place in _PLACES]
    read = [source for source in sources if source is not None]
    values = [value for source in read if (value := _table(source)) is not None]
    if not values:
        # A table that moved to a new file is not known; one that never was has no file at all.
        mla = os.path.join(site_packages, "flashinfer", "mla")
        known = os.path.isdir(mla) and not any("_sm120" in name for name in os.listdir(mla))
        return FlashInfer(version, "none" if known or not version else "unknown")
    value = values[0]
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name)):
        return FlashInfer(version, "unknown")
    if value.func.id != "frozenset":
        # Asking it means importing FlashInfer: the start does.
        return FlashInfer(version, "rule" if _is_asked(value.func.id, read) else "unknown")
    try:
        return FlashInfer(version, "pairs", frozenset(ast.literal_eval(value.args[0])))
    except (ValueError, TypeError, IndexError):
        return FlashInfer(version, "unknown")


def _is_asked(name: str, sources: list[bytes]) -> bool:
    """Whether `(heads, keys) in` an object of this class is a question that it answers."""
    parsed = [node for source in sources for node in _body(source)]
    return any(
        isinstance(node, ast.ClassDef)
        and node.name == name
        and "__contains__" in {getattr(member, "name", "") for member in node.body}
        for node in parsed
    )


def _table(source: bytes) -> ast.expr | None:
    for node in _body(source):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == TABLE:
            return node.value
    return None


def _body(source: bytes) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError):
        return []
