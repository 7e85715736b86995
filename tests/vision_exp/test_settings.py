"""What the VISION_EXP_* variables may say, and that each is read in one place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from vision_exp import settings

ROOT = Path(__file__).parents[2]

SWITCHES = (
    (settings.DISABLE, settings.disabled, False),
    (settings.REQUIRE_VISIBILITY, settings.requires_visibility, False),
    (settings.FAST_PIXELS, settings.fast_pixels, True),
    (settings.TOWER_GRAPHS, settings.tower_graphs, True),
    (settings.TOWER_QUACK, settings.tower_quack, True),
)
CHOICES = (
    (settings.TOOL_IMAGES, settings.tool_images, ("refuse", "move", "note")),
    (settings.IMAGE_OVERFLOW, settings.image_overflow, ("refuse", "keep-newest")),
)

# Rooms that still read their variable themselves. Must become empty.
STILL_READ_ELSEWHERE = {
    "chat/rules.py",
    "image/pixels.py",
    "tower/graphs.py",
    "tower/swiglu.py",
    "visibility/hooks.py",
}


@pytest.mark.parametrize(("name", "read", "default"), SWITCHES)
def test_switches(
    name: str, read: Callable[[], bool], default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert read() is default
    for values, expected in (
        (("", " "), default),
        (("1", "true", "yes", "on", "True", "2"), True),
        (("0", "false", "no", "off", "FALSE", " 0 "), False),
    ):
        for value in values:
            monkeypatch.setenv(name, value)
            assert read() is expected, value


@pytest.mark.parametrize(("name", "read", "allowed"), CHOICES)
def test_choices(
    name: str,
    read: Callable[[], str],
    allowed: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert read() == allowed[0]
    for value in ("", *allowed):
        monkeypatch.setenv(name, value)
        assert read() == (value or allowed[0])
    monkeypatch.setenv(name, "perhaps")
    with pytest.raises(ValueError, match=rf"{name}='perhaps': expected one of {allowed[0]}, "):
        read()


def test_eps_is_kept_at_one_word_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.RMS_NORM_EPS, raising=False)
    assert not settings.keeps_eps()
    for value, expected in (("keep", True), ("", False), ("1e-6", False)):
        monkeypatch.setenv(settings.RMS_NORM_EPS, value)
        assert settings.keeps_eps() is expected


def test_every_variable_is_read_here_and_nowhere_else() -> None:
    read_elsewhere = {
        str(path.relative_to(ROOT / "vision_exp"))
        for path in (ROOT / "vision_exp").rglob("*.py")
        if path.name != "settings.py" and re.search(r'"VISION_EXP_', path.read_text())
    }
    assert read_elsewhere == STILL_READ_ELSEWHERE


def test_every_variable_is_in_the_readme() -> None:
    names = {value for key, value in vars(settings).items() if key.isupper() and key[0] != "_"}
    readme = (ROOT / "README.md").read_text()
    assert len(names) == 8
    assert [name for name in sorted(names) if name not in readme] == []
