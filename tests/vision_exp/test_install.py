"""The hook's entry point, without vLLM: when it acts, and for whom."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_config

from vision_exp import install as hooks
from vision_exp.layout import PLACEHOLDER_ID

ROOT = Path(__file__).parents[2]


class DeepseekV4Config:
    """Stands for vLLM's class: keeps every keyword as an attribute."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@pytest.fixture
def config_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """A fresh config class with the hook's wraps, in a process that has seen no vision config."""
    monkeypatch.setattr(hooks, "_activated", False)
    monkeypatch.setattr(hooks, "_model_sites", {})
    monkeypatch.setattr(hooks, "installed", hooks.installed)
    monkeypatch.delenv("VISION_EXP_DISABLE", raising=False)
    monkeypatch.delenv("VISION_EXP_RMS_NORM_EPS", raising=False)

    made = type("DeepseekV4Config", (DeepseekV4Config,), {"__module__": __name__})
    made.__init__ = lambda self, **values: DeepseekV4Config.__init__(self, **values)
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Records what would be installed instead of doing it."""
    made: list[tuple[str, str]] = []
    monkeypatch.setattr(
        hooks, "_call", lambda module, function, *_: made.append((module, function))
    )
    return made


def install(config_class: type) -> None:
    namespace = {"DeepseekV4Config": config_class}
    hooks.install("config", namespace, plan="p" * 64, overlay="o" * 64)


def test_text_only_and_v41_configs_activate_nothing(config_class: type, calls: list) -> None:
    install(config_class)
    text = config_class(**tiny_config.text_config())
    config_class(**tiny_config.vision_config(vision_config={"depth": 1}))
    config_class(**tiny_config.vision_config(vision_n_layers=0))
    config_class()
    pickle_twin = copy.deepcopy(text)
    assert not calls
    assert vars(pickle_twin) == vars(text) == tiny_config.text_config()


def test_the_first_vision_config_installs_every_feature_once(
    config_class: type, calls: list
) -> None:
    install(config_class)
    for site in ("model", "dspark", "mtp"):
        hooks.install(site, {}, plan="p", overlay="o")
    assert not calls, "model sites wait for a vision config"
    assert hooks.installed == hooks.Installed(plan="p", overlay="o"), "for the evidence line"
    for _ in range(2):
        config_class(**tiny_config.vision_config())
    features = [(name, "install") for name in hooks.FEATURES]
    assert calls[: len(features)] == features
    assert calls[len(features) :] == [
        (name, "install_model" if site == "model" else "install_draft")
        for site in ("model", "dspark", "mtp")
        for name in hooks.MODEL_FEATURES
    ]


def test_model_sites_imported_later_are_wrapped_at_once(config_class: type, calls: list) -> None:
    install(config_class)
    config_class(**tiny_config.vision_config())
    calls.clear()
    hooks.install("model", {}, plan="p", overlay="o")
    assert calls == [(name, "install_model") for name in hooks.MODEL_FEATURES]


def test_installing_twice_wraps_once(config_class: type, calls: list) -> None:
    install(config_class)
    once = config_class.__init__
    install(config_class)
    assert config_class.__init__ is once


def test_threads_activate_once(
    config_class: type, calls: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(config_class)
    # Each takes a while, so that one that does not wait for the others is noticed.
    slow = lambda *_: (time.sleep(0.005), calls.append(_))  # noqa: E731
    monkeypatch.setattr(hooks, "_call", slow)
    start = threading.Barrier(8)

    def build() -> None:
        start.wait()
        config_class(**tiny_config.vision_config())

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == len(hooks.FEATURES)


def test_a_failed_activation_is_raised_and_tried_again(
    config_class: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(config_class)
    broken = True
    done: list[str] = []

    def call(module: str, function: str, *_: Any) -> None:
        if broken and module == hooks.FEATURES[2]:
            raise RuntimeError("this release lacks a function")
        done.append(module)

    monkeypatch.setattr(hooks, "_call", call)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lacks a function"):
            config_class(**tiny_config.vision_config())
    broken = False
    config_class(**tiny_config.vision_config())
    assert done[-len(hooks.FEATURES) :] == list(hooks.FEATURES)


def test_what_a_vision_config_gets(
    config_class: type, calls: list, caplog: pytest.LogCaptureFixture
) -> None:
    install(config_class)
    hooks._log_eps.cache_clear()
    with caplog.at_level("INFO", "vllm.vision_exp"):
        config = config_class(**tiny_config.vision_config())
        config_class(**tiny_config.vision_config())
    assert config.is_mm_prefix_lm is True
    assert config.mm_prefix_clamp_sliding_window is True
    assert config.image_token_index == PLACEHOLDER_ID == 129264
    assert config.rms_norm_eps == 1e-6
    assert caplog.text.count("rms_norm_eps 1e-20 -> 1e-06") == 1
    native = tiny_config.vision_config(architectures=["DeepseekV4ForConditionalGeneration"])
    assert config_class(**native).architectures == ["DeepseekV4ForCausalLM"]
    other = tiny_config.vision_config(architectures=["Draft"], image_token_index=7)
    assert config_class(**other).architectures == ["Draft"]
    assert config_class(**other).image_token_index == 7


def test_every_room_that_wraps_something_is_installed() -> None:
    package = ROOT / "vision_exp"
    found = {f"{path.parent.name}.hooks": path.read_text() for path in package.glob("*/hooks.py")}
    assert set(hooks.FEATURES) == set(found)
    models = {name for name, text in found.items() if "\ndef install_model(" in text}
    assert set(hooks.MODEL_FEATURES) == models
    assert models == {name for name, text in found.items() if "\ndef install_draft(" in text}


@pytest.mark.parametrize(
    ("keep", "given", "expected"),
    [("keep", 1e-20, 1e-20), ("", 1e-20, 1e-6), ("", 1e-6, 1e-6), ("keep", 1e-6, 1e-6)],
)
def test_eps(
    config_class: type,
    calls: list,
    monkeypatch: pytest.MonkeyPatch,
    keep: str,
    given: float,
    expected: float,
) -> None:
    install(config_class)
    monkeypatch.setenv("VISION_EXP_RMS_NORM_EPS", keep)
    assert config_class(**tiny_config.vision_config(rms_norm_eps=given)).rms_norm_eps == expected
    text = config_class(**tiny_config.text_config(rms_norm_eps=given))
    assert text.rms_norm_eps == given


def test_disable_wraps_nothing(
    config_class: type, calls: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISION_EXP_DISABLE", "1")
    stock = config_class.__init__
    install(config_class)
    hooks.install("model", {}, plan="p", overlay="o")
    assert config_class.__init__ is stock
    config = config_class(**tiny_config.vision_config())
    assert config.rms_norm_eps == 1e-20
    assert not calls
    assert not hooks._model_sites


def test_an_unknown_site_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        hooks.install("nowhere", {}, plan="p", overlay="o")


SCRIPT = """
import os, pickle, sys
from vision_exp import install as hooks
import fake_config
hooks.install("config", vars(fake_config), plan="p", overlay="o")
hooks._call = lambda module, function, *_: seen.append(module)
seen = []
{act}
print(len(seen), hooks._activated)
"""
FAKE = """
class DeepseekV4Config:
    def __init__(self, **values):
        self.__dict__.update(values)
"""


def run(tmp_path: Path, act: str, *args: str) -> str:
    (tmp_path / "fake_config.py").write_text(FAKE)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(act=act), *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_spawned_process_activates_when_it_unpickles_a_config(tmp_path: Path) -> None:
    build = (
        "import tiny_config, pathlib\n"
        "config = fake_config.DeepseekV4Config(**tiny_config.{kind}_config())\n"
        "pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(config))\n"
    )
    load = "config = pickle.loads(open(sys.argv[1], 'rb').read())\nassert config.hidden_size\n"
    count = len(hooks.FEATURES)
    vision, text = tmp_path / "vision.pickle", tmp_path / "text.pickle"
    assert run(tmp_path, build.format(kind="vision"), str(vision)) == f"{count} True"
    assert run(tmp_path, load, str(vision)) == f"{count} True"
    assert run(tmp_path, build.format(kind="text"), str(text)) == "0 False"
    assert run(tmp_path, load, str(text)) == "0 False"


def test_a_forked_process_is_active_already_and_does_not_hang(tmp_path: Path) -> None:
    act = (
        "import tiny_config, threading\n"
        "make = lambda: fake_config.DeepseekV4Config(**tiny_config.vision_config())\n"
        "held, leave = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with hooks._lock:\n"
        "        held.set(); leave.wait()\n"
        "threading.Thread(target=hold).start(); held.wait()\n"
        "pid = os.fork()\n"  # with the lock held by a thread that the child does not have
        "if pid == 0:\n"
        "    make(); os._exit(0 if hooks._activated else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "leave.set(); make()\n"
    )
    assert run(tmp_path, act) == f"{len(hooks.FEATURES)} True"


def test_importing_the_package_and_the_entry_point_stays_cheap(tmp_path: Path) -> None:
    script = (
        "import sys; before = set(sys.modules)\n"
        "import vision_exp; assert 'vision_exp.install' not in sys.modules\n"
        "from vision_exp import install\n"
        "assert not {'torch', 'vllm', 'transformers', 'PIL', 'numpy'} & set(sys.modules)\n"
        "print(sorted(n for n in set(sys.modules) - before if n.startswith('vision_exp')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    names = ("config", "install", "patching", "settings")
    expected = ["vision_exp", *(f"vision_exp.{name}" for name in names)]
    assert done.stdout.strip() == str(expected)
