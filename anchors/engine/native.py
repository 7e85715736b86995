"""Decides by content whether a vLLM has vision code for this model already, and whose."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from anchors.digests import read_file

PACKAGE = "models/deepseek_v4"
REGISTRY = "model_executor/models/registry.py"
UPSTREAM_CLASS = "DeepseekV4ForConditionalGeneration"
_FOLDERS = ("", "common", "nvidia")
_ENTRY = re.compile(rf'"{UPSTREAM_CLASS}"\s*:\s*\(\s*"([\w.]+)"\s*,\s*"(\w+)"'.encode())
_MULTIMODAL = re.compile(rb"^class\s+(\w+)\s*\([^)]*\bSupportsMultiModal\b", re.MULTILINE)
_MARKS = (b"[vision-exp-hotfix]", b"apply_vision_exp", b"import vision_exp", b"from vision_exp")


@dataclass(frozen=True)
class Verdict:
    """`state` is `superseded` or `foreign`; `detail` is the evidence in one line."""

    state: str
    detail: str


def assess(vllm_root: str, stock: Mapping[str, bytes | None]) -> Verdict | None:
    """None for a text-only vLLM. `stock` holds the target files without our blocks."""
    files = {**_package(vllm_root), **{path: data for path, data in stock.items() if data}}
    registry = read_file(os.path.join(vllm_root, REGISTRY)) or b""
    for path, data in files.items():
        for mark in _MARKS:
            if mark in data:
                return Verdict("foreign", f'{path} has "{mark.decode()}" of another hotfix')
    entry = _ENTRY.search(registry)
    if entry:
        name = b".".join(entry.groups()).decode()
        return Verdict("superseded", f"{name} serves this model natively")
    if UPSTREAM_CLASS.encode() in files.get(f"{PACKAGE}/__init__.py", b""):
        return Verdict("superseded", f"vllm.{PACKAGE}.{UPSTREAM_CLASS}".replace("/", "."))
    return _fork(files)


def _fork(files: dict[str, bytes]) -> Verdict | None:
    """A fork that has routing, tower and a multimodal class serves the model; less is foreign."""
    package = {path: data for path, data in files.items() if path.startswith(PACKAGE)}
    routing = _first(package, b"bias_vl")
    tower = _first(files, b"vision_n_layers") or next(
        (p for p in sorted(package) if p.endswith(("/vl_model.py", "/vision_model.py"))), None
    )
    # Draft loaders of some text-only forks spell the name bias_vl in passing: model.py decides.
    model = f"{PACKAGE}/nvidia/model.py"
    if not tower and b"bias_vl" not in files.get(model, b""):
        return None
    for path, data in sorted(package.items()):
        found = _MULTIMODAL.search(data)
        if found and routing and tower:
            name = found.group(1).decode()
            return Verdict("superseded", f"class {name} in {path} serves this model natively")
    evidence = ", ".join(path for path in (routing, tower) if path)
    return Verdict("foreign", f"vision code of a fork in {evidence}")


def _first(files: dict[str, bytes], text: bytes) -> str | None:
    return next((p for p in sorted(files) if text in files[p]), None)


def _package(vllm_root: str) -> dict[str, bytes]:
    files = {}
    for folder in _FOLDERS:
        place = os.path.join(vllm_root, PACKAGE, folder)
        for name in sorted(os.listdir(place)) if os.path.isdir(place) else ():
            if name.endswith(".py") and os.path.isfile(os.path.join(place, name)):
                path = "/".join(part for part in (PACKAGE, folder, name) if part)
                files[path] = read_file(os.path.join(place, name)) or b""
    return files
