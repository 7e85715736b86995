"""What the injected lines do in vLLM's process, run here against a staged package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from anchors.digests import staged_digest
from anchors.kit import hook
from anchors.kit.anchor import Values

INSTALL = (
    "def install(site, namespace, **digests):\n    namespace.setdefault('calls', []).append("
    "(site, digests))\n"
)
VISION = {"vision_n_layers": 2}


class Model:
    """Stands for the class of vLLM that is guarded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.built = kwargs


@pytest.fixture(params=["over'lay \\ \"", "\U0001f600é \\"], ids=["quotes", "beyond ASCII"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A staged overlay, in a process that has imported none, beside a vLLM of ours."""
    folder = tmp_path / request.param / "vision_exp"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "install.py").write_text(INSTALL)
    for place in (folder, folder.parent):
        place.chmod(0o755)
    vllm = ModuleType("vllm")
    (tmp_path / "vllm").mkdir()
    vllm.__file__ = str(tmp_path / "vllm" / "__init__.py")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vision_exp"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("VISION_EXP_DISABLE", raising=False)
    return folder.parent


def run(root: Path, digest: str | None = None) -> dict[str, Any]:
    """The namespace of a patched module after its import."""
    overlay = digest or staged_digest(str(root / "vision_exp")) or ""
    text = hook.render("model", "Model", Values(root=str(root), overlay=overlay, plan="plan"))
    made = type("Model", (Model,), {"__init__": Model.__init__})
    space: dict[str, Any] = {"__name__": "vllm.models.x", "Model": made}
    try:
        exec(compile(text, "model.py", "exec"), space)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vision_exp"]:
            del sys.modules[name]
    assert "_vision_exp_hook" not in space
    return space


def refused(space: dict[str, Any]) -> str:
    """Why a vision checkpoint is not built; every other one is."""
    assert "calls" not in space
    for values in ({}, {"vision_n_layers": 0}, {**VISION, "vision_config": {"depth": 1}}):
        config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(**values)))
        assert space["Model"](vllm_config=config).built == {"vllm_config": config}
        assert space["Model"](**values).built == values  # a config's own constructor
    with pytest.raises(RuntimeError, match="no image input") as told:
        space["Model"](**VISION)
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(**VISION)))
    with pytest.raises(RuntimeError, match="no image input"):
        space["Model"](vllm_config=config)
    return str(told.value)


def test_what_is_staged_is_installed_with_its_digests(root: Path) -> None:
    (root / "vision_exp" / "__pycache__").mkdir()
    (root / "vision_exp" / "__pycache__" / "install.pyc").write_bytes(b"x")
    (root / "vision_exp" / "preview.py").write_text("not staged\n")
    space = run(root)
    digest = staged_digest(str(root / "vision_exp"))
    assert space["calls"] == [("model", {"plan": "plan", "overlay": digest})]
    assert space["Model"](**VISION).built == VISION


def test_disabled_nothing_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISION_EXP_DISABLE", "1")
    space = run(root, "0" * 64)
    assert "calls" not in space
    assert space["Model"](**VISION).built == VISION


def test_another_digest_is_not_loaded(root: Path) -> None:
    assert "the digests differ" in refused(run(root, "0" * 64))
    digest = staged_digest(str(root / "vision_exp"))
    (root / "vision_exp" / "install.py").write_text(INSTALL + "# changed\n")
    assert f"expects vision overlay {digest}" in refused(run(root, digest))


def test_an_overlay_that_is_gone(root: Path) -> None:
    for path in (root / "vision_exp").iterdir():
        path.unlink()
    (root / "vision_exp").rmdir()
    assert "found nothing in" in refused(run(root, "0" * 64))


@pytest.mark.parametrize("place", ["", "vision_exp"])
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_what_others_can_write_is_not_loaded(root: Path, place: str, mode: int) -> None:
    (root / place).chmod(mode)
    assert f"can write {root / place}" in refused(run(root))


@pytest.mark.parametrize("place", ["", "vision_exp"])
def test_what_another_user_owns_is_not_loaded(root: Path, place: str) -> None:
    real = os.stat

    def stat(path: Any, **options: Any) -> Any:
        found = real(path, **options)
        if str(path) != str(root / place):
            return found
        return SimpleNamespace(st_uid=4711, st_mode=found.st_mode)

    with mock.patch.object(os, "stat", stat):
        assert "others than root" in refused(run(root))


def test_an_install_that_fails_is_kept_for_the_vision_checkpoint(root: Path) -> None:
    (root / "vision_exp" / "install.py").write_text("raise KeyError('a fault')\n")
    assert "KeyError: 'a fault'" in refused(run(root))


def test_a_package_that_is_imported_already_has_to_be_this_one(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere" / "vision_exp"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("other = 1\n")
    package = ModuleType("vision_exp")
    package.__file__ = str(other / "__init__.py")
    monkeypatch.setitem(sys.modules, "vision_exp", package)
    said = refused(run(root))
    assert "the digests differ" in said and f"in {other}" in said
