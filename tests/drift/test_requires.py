"""Whatever an overlay module wraps or imports of vLLM stands in the REQUIRES of its room.

Reads the sources only. What modules read beside that (attributes, parameters) cannot be told from
their own, so this finds forgotten wrappers and imports, not every forgotten need.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from anchors.engine import requirements
from anchors.engine.modules import Name

from .conftest import REPO

OVERLAY = REPO / "vision_exp"
OWN = {
    node.name
    for path in OVERLAY.rglob("*.py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.ClassDef)
}


def stated(file: str, folder: Path = OVERLAY) -> list[Name]:
    """Every name in the REQUIRES of one overlay module, or of the room that it is in."""
    entries = requirements.collect(str(folder))
    room = f"{Path(file).parts[0]}/" if len(Path(file).parts) > 1 else file
    return [name for entry in entries if entry.used_by.startswith(room) for name in entry.names]


def unstated(source: str, names: list[Name]) -> Iterator[str]:
    """What the module wraps or imports of vLLM and does not state."""
    tree = ast.parse(source)
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    modules = {"vllm." + name.module.replace("/", ".") for name in names}
    members = {(owner, name.name) for name in names for owner in (name.owner, None)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) == "when_imported":
            module = literal(node.args[0], constants)
            if module.startswith("vllm.") and module not in modules:
                yield f"waits for {module}"
        elif isinstance(node, ast.Call) and called(node) == "wrap" and len(node.args) == 3:
            member = (wrapped(node.args[0], tree), literal(node.args[1], constants))
            if member not in members and member[0] not in OWN:
                yield f"wraps {'.'.join(filter(None, member))}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                # A package may hand on what a module of it defines.
                bound = {
                    name.owner or name.name
                    for name in names
                    if f"vllm.{name.module.replace('/', '.')}.".startswith(f"{node.module}.")
                }
                if inside not in modules and alias.name not in bound:
                    yield f"imports {inside}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("vllm") and alias.name not in {*modules, "vllm"}:
                    yield f"imports {alias.name}"


def called(node: ast.Call) -> str:
    """`f` of `patching.f(...)`; other calls give ""."""
    function = node.func
    ours = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "patching"
    return function.attr if ours and isinstance(function, ast.Attribute) else ""


def literal(node: ast.expr, constants: dict[str, object]) -> str:
    if isinstance(node, ast.Name):
        return str(constants[node.id])
    assert isinstance(node, ast.Constant), f"line {node.lineno}: not a literal"
    return str(node.value)


def wrapped(node: ast.expr, tree: ast.Module) -> str | None:
    """The class that is wrapped: `module.X`, `namespace["X"]` or a variable bound to one of them.

    None for what only a call tells: a parameter, a module, an object.
    """
    if isinstance(node, ast.Name):
        values = [
            other.value
            for other in ast.walk(tree)
            if isinstance(other, ast.Assign)
            and isinstance(other.targets[0], ast.Name)
            and other.targets[0].id == node.id
        ]
        return wrapped(values[-1], tree) if values else None
    if isinstance(node, ast.Attribute):
        return node.attr if node.attr.lstrip("_")[:1].isupper() else None  # else an object's part
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return None


FILES = sorted(str(path.relative_to(OVERLAY)) for path in OVERLAY.rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_every_wrapped_or_imported_name_is_stated(file: str) -> None:
    source = (OVERLAY / file).read_text(encoding="utf-8")
    assert list(unstated(source, stated(file))) == []


def test_alternatives_are_one_thing_in_several_places() -> None:
    """A name that is there only because the release is old says nothing about the need."""
    entries = requirements.collect(str(OVERLAY))
    assert [entry.text for entry in entries if len({name.name for name in entry.names}) > 1] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('patching.when_imported("vllm.b", f)', "waits for vllm.b"),
        ('X = "vllm.b"\npatching.when_imported(X, f)', "waits for vllm.b"),
        ('patching.wrap(module.C, "run", f)', "wraps C.run"),
        ('patching.wrap(namespace["C"], "run", f)', "wraps C.run"),
        ('c = module.C\npatching.wrap(c, "run", f)', "wraps C.run"),
        ('def g(module):\n patching.wrap(module, "run", f)', "wraps run"),
        ('def g(a):\n patching.wrap(a.part, "run", f)', "wraps run"),
        ("def g():\n from vllm.a import C", "imports vllm.a.C"),
        ("from vllm import a", ""),
        ("import vllm.b as b", "imports vllm.b"),
        ('patching.when_imported("vllm.a", f)\npatching.wrap(module.D, "go", f)', ""),
        ("from vllm.a import thing\nfrom vllm import thing", ""),
    ],
)
def test_a_forgotten_name_is_found(source: str, found: str) -> None:
    entries = ("vllm.a:D.go(x)", "vllm.a:thing | vllm.other:thing")
    names = [name for text in entries for name in requirements.parse(text, "here.py").names]
    assert list(unstated(source, names)) == ([found] if found else [])
