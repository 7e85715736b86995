"""The validator says what cancelled requests leave on a server, where that shows."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from vision_exp.validate import checks, metrics, run

sys.path.insert(0, str(Path(__file__).parent))

import fake_server

(CHECK,) = (one for one in checks.CHECKS if one.name == "what cancelled requests leave")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PATIENCE", 2.0)


def _run(url: str) -> dict[str, Any]:
    async def explored() -> dict[str, Any]:
        return await run.run(CHECK, await run.explore(checks.Session(url)))

    return asyncio.run(explored())


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("no gauges", "--disable-log-stats"),
        ("never at rest", "other clients' requests"),
        ("paths count", "HTTP 404"),
        ("short streams", "nothing was hung up on"),
    ],
)
def test_what_is_left_is_judged_only_where_it_shows(fault: str, why: str) -> None:
    with fake_server.serving(fault) as url:
        found = _run(url)
    assert found["state"] == "skipped" and why in found["detail"], found


def test_what_is_left_is_named() -> None:
    with fake_server.serving("cancelled requests run on") as url:
        found = _run(url)
    assert found["detail"].startswith("left: running, KV cache in use; running 0 and "), found
    with fake_server.serving() as url:
        found = _run(url)
    assert found["detail"].startswith("running 0 and 0, waiting 0 and 0"), found
