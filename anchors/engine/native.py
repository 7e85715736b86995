"""Decides by code whether a vLLM has vision for this model already, whose, and what it serves with.

Comments, strings and names of files that nothing imports decide nothing: `follow` goes the way of
vLLM's own import, from the registries to the classes that serve the architecture and the model
type on the platform that the vLLM was built for.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from anchors.engine.follow import DeadEnd, Follower, Place
from anchors.engine.modules import Read
from anchors.engine.platforms import DEFAULT, FOLDERS, Platform

PACKAGE = "models/deepseek_v4"
REGISTRY = "model_executor/models/registry.py"
CONFIGS = "transformers_utils/config.py"
UPSTREAM_CLASS = "DeepseekV4ForConditionalGeneration"
#: The folders whose files the hotfix patches, one for each platform.
PATCHED = tuple(f"{PACKAGE}/{folder}" for folder in (DEFAULT, *FOLDERS.values()))
#: Architecture -> the file, in a platform's folder, whose class is expected to serve it.
_SERVES = {
    "DeepseekV4ForCausalLM": "model.py",
    "DSparkDraftModel": "dspark.py",
    "DeepSeekV4MTPModel": "mtp.py",
}
_ARCHITECTURE = next(iter(_SERVES))
_CONFIG = "transformers_utils/configs/deepseek_v4.py"
_TARGETS = (
    *(f"{folder}/{file}" for folder in PATCHED for file in _SERVES.values()),
    _CONFIG,
    "tokenizers/deepseek_v4_encoding.py",
)
_FOLDERS = ("", "common", DEFAULT, *FOLDERS.values())
_MARKS = (b"[vision-exp-hotfix]", b"apply_vision_exp", b"import vision_exp", b"from vision_exp")
_PATCHED = f"this hotfix patches {' and '.join(PATCHED)}"


@dataclass(frozen=True)
class Verdict:
    """`state` is `superseded`, `foreign`, `not-applicable` or `drifted`; `detail` is the evidence
    in one line."""

    state: str
    detail: str


def assess(root: str, read: Read, platform: Platform) -> Verdict | None:
    """None for a text-only vLLM that serves the model with what the hotfix patches.

    `read(path)` gives any file of the tree in `root`, the target files without our blocks.
    """
    found = {path: read(path) or b"" for path in (*_package(root), *_TARGETS)}
    for path, data in found.items():
        for mark in _MARKS:
            if mark in data:
                return Verdict("foreign", f'{path} has "{mark.decode()}" of another hotfix')
    follower = Follower(read, platform.name)
    return (
        _upstream(follower, platform)
        or _fork(found, follower)
        or _elsewhere(follower, platform)
        or _config_elsewhere(follower)
    )


def _upstream(follower: Follower, platform: Platform) -> Verdict | None:
    """vLLM's own support for images: registered, there, and no stub on this platform."""
    try:
        place = _served(follower, UPSTREAM_CLASS)
    except DeadEnd as end:
        return Verdict("foreign", f"half of native support: {UPSTREAM_CLASS} leads to {end}")
    if place is None:
        try:
            place = follower.resolve(PACKAGE, UPSTREAM_CLASS)
        except DeadEnd:
            return None
        return Verdict("foreign", f"half of native support: {place}, which no registry names")
    if _raises(place.node):
        why = f"vLLM's own image input is not for {platform.label} builds ({platform.evidence})"
        return Verdict("not-applicable", f"{why}: {place} raises")
    name = f"vllm.{PACKAGE}.{UPSTREAM_CLASS}".replace("/", ".")
    return Verdict("superseded", f"{name} serves this model natively")


def _served(follower: Follower, architecture: str) -> Place | None:
    """The class that serves an architecture, None for one that is not registered.

    Raises DeadEnd where the registry leads to no class of this vLLM.
    """
    value = follower.entry(REGISTRY.removesuffix(".py"), "_VLLM_MODELS", architecture)
    if value is None:
        return None
    parts = [part.value for part in getattr(value, "elts", ()) if isinstance(part, ast.Constant)]
    if len(parts) != 2:
        raise DeadEnd(f"{ast.unparse(value)}, which only a run decides")
    module, name = map(str, parts)
    inner = module.removeprefix("vllm.") if module.startswith("vllm.") else ""
    return follower.resolve((inner or f"model_executor.models.{module}").replace(".", "/"), name)


def _raises(node: ast.ClassDef) -> bool:
    """Whether a class cannot be made: its `__init__` raises whatever it is given."""
    return any(
        isinstance(statement, ast.Raise)
        for member in node.body
        if isinstance(member, ast.FunctionDef) and member.name == "__init__"
        for statement in member.body
    )


def _fork(files: Mapping[str, bytes], follower: Follower) -> Verdict | None:
    """A fork that has routing, tower and serves a multimodal class serves the model; less is
    foreign."""
    package = {path: data for path, data in files.items() if path.startswith(PACKAGE)}
    routing = _first(package, "bias_vl")
    tower = _first(files, "vision_n_layers") or next(
        (p for p in sorted(package) if p.endswith(("/vl_model.py", "/vision_model.py"))), None
    )
    # Draft loaders of some text-only forks spell the name bias_vl in passing: model.py decides.
    models = [files.get(f"{folder}/model.py", b"") for folder in PATCHED]
    if not tower and not any(_says(data, "bias_vl") for data in models):
        return None
    try:
        served = _served(follower, _ARCHITECTURE)
    except DeadEnd:
        served = None
    if served and routing and tower and _is_multimodal(served.node):
        return Verdict("superseded", f"{served} serves this model natively")
    evidence = ", ".join(path for path in (routing, tower) if path)
    return Verdict("foreign", f"vision code of a fork in {evidence}")


def _elsewhere(follower: Follower, platform: Platform) -> Verdict | None:
    """Where the registry leads to other classes than the hotfix patches."""
    build = f"a build for {platform.label} ({platform.evidence})"
    if platform.name in ("xpu", "tpu"):
        return Verdict("not-applicable", f"{build}; {_PATCHED} only")
    for architecture, name in _SERVES.items():
        file = f"{PACKAGE}/{platform.folder}/{name}"
        try:
            place = _served(follower, architecture)
        except DeadEnd as end:
            if architecture != _ARCHITECTURE:
                continue  # a release without this draft
            return Verdict("drifted", f"{architecture} leads to {end}; {_PATCHED}")
        if place is None and architecture == _ARCHITECTURE:
            return Verdict("drifted", f"{REGISTRY} does not name {architecture}")
        other = architecture == _ARCHITECTURE and place and place.node.name != _ARCHITECTURE
        if place is not None and (place.file != file or other):
            if platform.name in ("cuda", *FOLDERS):
                return Verdict("drifted", f"{architecture} leads to {place}; {_PATCHED}")
            return Verdict("not-applicable", f"{build}, which serves with {place}; {_PATCHED}")
    return None


def _config_elsewhere(follower: Follower) -> Verdict | None:
    """Where the registry of configs leads to another class than the hotfix patches."""
    try:
        value = follower.entry(CONFIGS.removesuffix(".py"), "_CONFIG_REGISTRY", "deepseek_v4")
        if value is None:
            return Verdict("drifted", f"{CONFIGS} does not name deepseek_v4")
        if isinstance(value, ast.Constant):
            place = follower.resolve("transformers_utils/configs", str(value.value))
        else:
            place = follower.resolve(CONFIGS.removesuffix(".py"), ast.unparse(value))
    except DeadEnd as end:
        return Verdict("drifted", f"the config of model type deepseek_v4 leads to {end}")
    if (place.file, place.node.name) != (_CONFIG, "DeepseekV4Config"):
        return Verdict(
            "drifted",
            f"model type deepseek_v4 leads to {place}; this hotfix patches {_CONFIG}",
        )
    return None


def _is_multimodal(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split(".")[-1] == "SupportsMultiModal" for base in node.bases)


def _first(files: Mapping[str, bytes], word: str) -> str | None:
    return next((p for p in sorted(files) if _says(files[p], word)), None)


@functools.lru_cache(maxsize=400)
def _says(data: bytes, word: str) -> bool:
    """Whether code has `word`: in a name, or in a string that is used and no docstring."""
    if word.encode() not in data:
        return False
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # the sites and the run-time needs judge a file that does not parse
    loose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        texts = [getattr(node, part, None) for part in ("id", "attr", "arg", "name", "value")]
        if node not in loose and any(isinstance(text, str) and word in text for text in texts):
            return True
    return False


def _package(root: str) -> list[str]:
    found = []
    for folder in _FOLDERS:
        place = os.path.join(root, PACKAGE, folder)
        for name in sorted(os.listdir(place)) if os.path.isdir(place) else ():
            if name.endswith(".py") and os.path.isfile(os.path.join(place, name)):
                found.append("/".join(part for part in (PACKAGE, folder, name) if part))
    return found
