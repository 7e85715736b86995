"""Routing must run in a step without waiting for the device and be capturable in a CUDA graph."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "vision_exp"
FILES = (
    *(
        f"routing/{name}.py"
        for name in ("hooks", "kernel", "reference", "select", "support", "topk")
    ),
    *(f"engine/{name}.py" for name in ("context", "spans", "step")),
)
# Each waits for the device, or makes a tensor whose shape depends on data.
CALLS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "bincount",
    "repeat_interleave",
    "synchronize",
    "is_nonzero",
    "equal",
    "allclose",
}


def findings(source: str) -> list[str]:
    """What in `source` could synchronise: forbidden calls, and indexing with a boolean mask."""
    tree = ast.parse(source)
    masks = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _boolean(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            if name in CALLS or (name == "where" and len(node.args) == 1):
                found.append(f"{node.lineno}: {name}()")
        elif isinstance(node, ast.Subscript) and not _annotation(node):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if any(_boolean(part, masks) for part in parts):
                found.append(f"{node.lineno}: boolean index")
    return found


def _boolean(node: ast.expr, masks: set[str]) -> bool:
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, (ast.Invert, ast.Not))
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        return _boolean(node.left, masks) or _boolean(node.right, masks)
    if isinstance(node, ast.Name):
        return node.id in masks or "mask" in node.id
    return isinstance(node, ast.Call) and "mask" in ast.unparse(node.func)


def _annotation(node: ast.Subscript) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("dict", "tuple", "Callable")


@pytest.mark.parametrize("name", FILES)
def test_nothing_waits_for_the_device(name):
    assert findings((PACKAGE / name).read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "n = x.item()",
        "rows = mask.nonzero()",
        "rows = torch.where(x)",
        "y = x[x > 0]",
        "x[image_mask] = 0",
        "chosen = a == b\ny = x[chosen]",
        "y = x[~chosen, 0]",
        "y = torch.masked_select(x, m)",
        "y = x[image_token_mask(ids)]",
    ],
)
def test_the_lint_sees(line):
    assert findings(line)
