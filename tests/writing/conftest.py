"""Tests of crash-safe writing sync every file at every step: their folders are in memory."""

from __future__ import annotations

import pytest
from memory_folders import tmp_path, tmp_path_factory
from write_faults import Steps, Worlds

__all__ = ["steps", "tmp_path", "tmp_path_factory", "worlds"]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Watches the steps of runs, and puts faults in front of them."""
    return Steps(monkeypatch)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """One vLLM, with what it holds before and after `apply`."""
    return Worlds(tmp_path_factory.mktemp("worlds") / "rig")
