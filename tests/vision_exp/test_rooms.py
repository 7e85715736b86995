"""The rooms of the overlay have one order, and what patches vLLM stands in their hooks.py.

Reads the sources alone, imports inside functions included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
OVERLAY = REPO / "vision_exp"

#: Lowest first: a module imports from its own room and from lower ones.
ROOMS = (
    "config",
    "settings",
    "patching",
    "layout",
    "install",
    "evidence",
    "image",
    "chat",
    "tower",
    "engine",
    "visibility",
    "routing",
    "model",
)
#: Run by hand and never staged, so above all rooms; the released sizes stand in preview alone.
TOOLS = ("preview", "validate")

MOST_LINES = 300
MOST_ENTRIES = 16


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name below vision_exp -> its tree. A package is known by its folder's name."""
    found = {}
    for path in sorted(OVERLAY.rglob("*.py")):
        parts = path.relative_to(OVERLAY).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def room(module: str) -> str:
    return module.split(".")[0]


@cache
def arrows() -> frozenset[tuple[str, str]]:
    """Every (module, module that it imports) of the overlay."""
    found = set()
    for module, tree in modules().items():
        for node in ast.walk(tree):
            for name in imported(node):
                if name != module:
                    found.add((module, name))
    return frozenset(found)


def imported(node: ast.AST) -> Iterator[str]:
    """The overlay's modules that one statement imports, dotted below vision_exp."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        stem = node.module or ""
        inside = [f"{stem}.{alias.name}" for alias in node.names]
        names = [name if name.partition(".")[2] in modules() else stem for name in inside]
    else:
        return
    for name in names:
        top, _, below = name.partition(".")
        if top == "vision_exp" and below:
            yield below


def test_every_module_has_a_room() -> None:
    assert {room(module) for module in modules() if module} <= {*ROOMS, *TOOLS}


def test_arrows_between_rooms_go_down_only() -> None:
    height = {name: index for index, name in enumerate((*ROOMS, *TOOLS))}
    assert not {(one, other) for one, other in arrows() if height[room(one)] < height[room(other)]}


def test_no_module_imports_itself_by_a_detour() -> None:
    after: dict[str, set[str]] = {module: set() for module in modules()}
    for one, other in arrows():
        after[one].add(other)
    reach = {module: set(targets) for module, targets in after.items()}
    for middle in reach:
        for module in reach:
            if middle in reach[module]:
                reach[module] |= reach[middle]
    circles = {
        frozenset(other for other in targets | {module} if module in reach[other])
        for module, targets in reach.items()
        if module in targets
    }
    assert not circles


def test_the_top_of_the_overlay_fits_one_glance() -> None:
    entries = {
        path.name
        for path in OVERLAY.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert len(entries) <= MOST_ENTRIES


def test_no_module_of_the_repository_is_too_long() -> None:
    folders = ("anchors", "vision_exp", "tests", "bench")
    files = [
        REPO / "hotfix.py",
        *(path for name in folders for path in (REPO / name).rglob("*.py")),
    ]
    long = {
        str(path.relative_to(REPO))
        for path in files
        if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES
    }
    assert not long


# --- patching ---------------------------------------------------------------------------------


def patches(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls of `patching.f(...)` that change something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "patching":
                yield node


def test_vllm_is_patched_from_hooks_alone() -> None:
    """install.py wraps the config class: that site is the one that starts everything."""
    elsewhere = {
        module
        for module, tree in modules().items()
        if module != "install" and module.split(".")[-1] != "hooks" and any(patches(tree))
    }
    assert not elsewhere


def test_each_room_has_one_hooks_module() -> None:
    hooks = [module for module in modules() if module.split(".")[-1] == "hooks"]
    assert len(hooks) == len({room(module) for module in hooks})


def wrapped(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(owner, name) of every `patching.wrap`; the owner with its module where that is said."""
    waiting_for = waiting(tree)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        bound = {
            node.targets[0].id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for call in patches(function):
            if not (isinstance(call.func, ast.Attribute) and call.func.attr == "wrap"):
                continue
            owner = call.args[0]
            if isinstance(owner, ast.Name):
                owner = bound.get(owner.id, owner)
            for where in waiting_for.get(function.name, [""]):
                yield f"{where}:{described(owner)}", literal(call.args[1], tree)


def described(owner: ast.expr) -> str:
    """`C` of `module.C` and of `namespace["C"]`, nothing of `module`."""
    if isinstance(owner, ast.Attribute):
        return owner.attr
    if isinstance(owner, ast.Subscript) and isinstance(owner.slice, ast.Constant):
        return str(owner.slice.value)
    return ""


def waiting(tree: ast.Module) -> dict[str, list[str]]:
    """Callback -> vLLM modules after whose import it runs."""
    found: dict[str, list[str]] = {}
    for call in patches(tree):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "when_imported":
            name, callback = call.args
            found.setdefault(ast.unparse(callback), []).append(literal(name, tree))
    return found


def literal(node: ast.expr, tree: ast.Module) -> str:
    """The string of a literal, or of a constant of the module."""
    if isinstance(node, ast.Name):
        (node,) = (
            other.value
            for other in tree.body
            if isinstance(other, ast.Assign) and ast.unparse(other.targets[0]) == node.id
        )
    return str(ast.literal_eval(node))


def test_no_function_is_wrapped_in_two_places() -> None:
    places: dict[tuple[str, str], list[str]] = {}
    for module, tree in modules().items():
        for pair in wrapped(tree):
            places.setdefault(pair, []).append(module)
    twice = {pair for pair, where in places.items() if len(where) > 1}
    assert not twice


@pytest.mark.parametrize(
    ("source", "pairs"),
    [
        ('def f(m):\n patching.wrap(m.C, "run", g)', {(":C", "run")}),
        ('def f(n):\n c = n["C"]\n patching.wrap(c, "run", g)', {(":C", "run")}),
        (
            'patching.when_imported("vllm.a", f)\ndef f(m):\n patching.wrap(m.C, "run", g)',
            {("vllm.a:C", "run")},
        ),
        ('def f(m):\n patching.wrap(m, "run", g)', {(":", "run")}),
    ],
)
def test_wrapped_functions_are_found(source: str, pairs: set[tuple[str, str]]) -> None:
    assert set(wrapped(ast.parse(source))) == pairs
