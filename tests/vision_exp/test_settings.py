"""What the VISION_EXP_* variables may say, and that each is read in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vision_exp import settings

ROOT = Path(__file__).parents[2]

SWITCHES = [one for one in vars(settings).values() if isinstance(one, settings.Switch)]
CHOICES = [one for one in vars(settings).values() if isinstance(one, settings.Choice)]
NAMES = {one.name for one in (*SWITCHES, *CHOICES)} | {settings.RMS_NORM_EPS}
ON_WHEN_UNSET = {
    settings.SELF_TEST,
    settings.FAST_PIXELS,
    settings.TOWER_GRAPHS,
    settings.TOWER_QUACK,
}


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda one: one.name)
def test_switches(switch: settings.Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(switch.name, raising=False)
    default = switch in ON_WHEN_UNSET
    assert switch.is_on() is default
    for values, expected in (
        (("", " "), default),
        (("1", "true", "yes", "on", "True", "2"), True),
        (("0", "false", "no", "off", "FALSE", " 0 "), False),
    ):
        for value in values:
            monkeypatch.setenv(switch.name, value)
            assert switch.is_on() is expected, value


@pytest.mark.parametrize("choice", CHOICES, ids=lambda one: one.name)
def test_choices(choice: settings.Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.name, raising=False)
    default = "auto" if choice is settings.TOWER_MODE else "refuse"
    assert choice.value() == default
    for value in ("", *choice.allowed):
        monkeypatch.setenv(choice.name, value)
        assert choice.value() == (value or default)
    monkeypatch.setenv(choice.name, "perhaps")
    with pytest.raises(ValueError, match=f"{choice.name}='perhaps': expected one of {default}, "):
        choice.value()


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
    assert not read_elsewhere


def test_every_variable_is_in_the_page_of_settings() -> None:
    page = (ROOT / "docs/settings.md").read_text()
    assert len(NAMES) == 11
    assert [name for name in sorted(NAMES) if name not in page] == []
