"""Who decides whether tensor-parallel ranks share the tower or the images."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from vision_exp import settings
from vision_exp.tower import mode


def ranks(hosts: str, setting: str = "auto") -> list[mode.Rank]:
    return [mode.Rank(host, setting) for host in hosts]


@pytest.mark.parametrize(
    ("given", "asked", "expected"),
    [
        (ranks("a"), "weights", "weights (1 tensor-parallel ranks on one host)"),
        (ranks("aa"), "weights", "weights (2 tensor-parallel ranks on one host)"),
        (ranks("ab"), "weights", "data (2 tensor-parallel ranks on 2 hosts)"),
        (ranks("aabb"), "weights", "data (4 tensor-parallel ranks on 2 hosts)"),
        (ranks("abcd"), "weights", "data (4 tensor-parallel ranks on 4 hosts)"),
        (ranks("aa"), "data", "data (--mm-encoder-tp-mode data)"),
        (ranks("ab", "weights"), "data", "weights (VISION_EXP_TOWER_MODE=weights)"),
        (ranks("aa", "data"), "weights", "data (VISION_EXP_TOWER_MODE=data)"),
    ],
)
def test_what_decides(given: list[mode.Rank], asked: str, expected: str) -> None:
    found = mode.decide(given, asked)
    assert f"{found.name} ({found.reason})" == expected
    assert found.data_parallel == expected.startswith("data")


def test_hosts_that_are_set_differently_are_named() -> None:
    given = [mode.Rank("a", "auto"), mode.Rank("b", "data")]
    with pytest.raises(mode.TowerModeError, match=r"rank 0: auto, rank 1: data\).*Next: set "):
        mode.decide(given, "weights")


def test_a_word_that_none_knows_is_refused_on_all_ranks() -> None:
    with pytest.raises(ValueError, match="VISION_EXP_TOWER_MODE='both': expected one of auto, "):
        mode.decide(ranks("ab", "both"), "weights")


def test_a_rank_says_its_host_and_its_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(settings.TOWER_MODE.name, "data")
    boot = tmp_path / "boot_id"
    boot.write_text("7c\n")
    monkeypatch.setattr(mode, "_BOOT_ID", boot)
    assert mode.this_rank() == mode.Rank("7c", "data")
    boot.unlink()
    assert mode.host() == socket.gethostname()


def test_the_log_says_which_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.vision_exp")
    mode.log(mode.decide(ranks("a"), "weights"), 1)
    assert not caplog.messages
    mode.log(mode.decide(ranks("ab"), "weights"), 2)
    assert caplog.messages == [
        "[vision-exp] tower mode data (2 tensor-parallel ranks on 2 hosts): 2 ranks, each holds "
        "all of it and takes images"
    ]
