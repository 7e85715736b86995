"""`verify --import`: what was patched is imported in a child, from the tree that was named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anchors.errors import NO, HotfixError
from anchors.verbs import inspect


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    """Of a vLLM with one patched module, one that needs no edit and one that is not there."""
    root = tmp_path / "site" / "vllm"
    (root / "models").mkdir(parents=True)
    for path in ("__init__.py", "models/__init__.py"):
        (root / path).touch()
    (root / "models" / "patched.py").write_text("import beside\n")
    (root / "models" / "stock.py").write_text("raise SystemExit('was not patched')\n")
    (tmp_path / "beside.py").write_text("value = 1\n")
    files = [
        SimpleNamespace(path="models/patched.py", stock=b"a", after=b"b"),
        SimpleNamespace(path="models/stock.py", stock=b"a", after=b"a"),
        SimpleNamespace(path="models/absent.py", stock=None, after=None),
    ]
    return SimpleNamespace(files=files, target=SimpleNamespace(root=str(root)), platform="cuda")


def test_it_is_the_named_vllm_with_the_callers_path(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    inspect._check_imports(plan)


def test_a_module_that_cannot_be_imported_is_a_no(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(HotfixError, match="No module named 'beside'") as told:
        inspect._check_imports(plan)
    assert (told.value.exit_code, told.value.reference) == (NO, "import-failed")
    assert told.value.hint.endswith("-c 'import vllm.models.patched'")
    assert any("patched.py" in line for line in told.value.context)
