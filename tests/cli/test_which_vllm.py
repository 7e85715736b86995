"""Which vLLM is meant: none, several, one that is no vLLM or never had the model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import hotfix_rig
import pytest
import sources
from bad_environments import MODEL, check_refusal
from hotfix_rig import Answer, Rig, contents, identity


def without_a_root(tmp_path: Path, *path: Path, **extra: str) -> Answer:
    """`hotfix.py apply` under the base Python, which has no vLLM but what `path` brings."""
    libraries = tmp_path / "libraries"
    libraries.mkdir(exist_ok=True)
    import libcst
    import yaml

    for module in (libcst, yaml):
        folder = Path(module.__file__ or "").parent
        if not (libraries / folder.name).exists():
            (libraries / folder.name).symlink_to(folder)
    done = subprocess.run(
        [sys._base_executable, "-B", str(hotfix_rig.HOTFIX), "apply"],  # type: ignore[attr-defined]
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONPATH": ":".join(map(str, (libraries, *path))),
            "VISION_EXP_OVERLAY_ROOT": str(tmp_path / "overlay"),
            **extra,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def test_no_vllm(tmp_path: Path) -> None:
    check_refusal(without_a_root(tmp_path), 6, "vllm")
    assert not (tmp_path / "overlay").exists()


def test_the_vllm_of_this_python(tmp_path: Path) -> None:
    sources.install("0.29.0", tmp_path / "one")
    answer = without_a_root(tmp_path, tmp_path / "one")
    assert answer.code == 0, answer.err
    assert str(tmp_path / "one" / "vllm") in answer.out


def test_two_vllms(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        sources.install("0.29.0", folder)
    before = [contents(folder) for folder in folders]
    answer = without_a_root(tmp_path, *folders)
    check_refusal(answer, 6, *map(str, folders))
    assert [contents(folder) for folder in folders] == before
    for name in ("VLLM_PACKAGE_ROOT", "VLLM_PACKAGE_DIR"):
        told = without_a_root(tmp_path, *folders, **{name: str(folders[1] / "vllm")})
        assert told.code == 0, told.err
    assert contents(folders[0]) == before[0]
    assert contents(folders[1]) != before[1]


def test_a_package_that_is_a_link(tmp_path: Path) -> None:
    """A folder that environments share is patched only where it is named."""
    sources.install("0.29.0", tmp_path / "shared")
    site = tmp_path / "with a space"
    site.mkdir()
    (site / "vllm").symlink_to(tmp_path / "shared" / "vllm")
    before = contents(tmp_path / "shared")
    answer = without_a_root(tmp_path, site)
    check_refusal(answer, 6, "is a link", f"--root {tmp_path}/shared/vllm apply")
    assert contents(tmp_path / "shared") == before
    named = without_a_root(tmp_path, site, VLLM_PACKAGE_ROOT=str(site / "vllm"))
    assert named.code == 0, named.err


def test_a_strict_editable_install_names_its_checkout(tmp_path: Path) -> None:
    """Setuptools makes a farm of links, which the checkout's edits shine through."""
    sources.install("0.29.0", tmp_path / "src")
    farm = tmp_path / "build" / "__editable__.vllm-0.29.0-py3-none-any"
    for file in (tmp_path / "src" / "vllm").rglob("*"):
        if file.is_file():
            link = farm / file.relative_to(tmp_path / "src")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    before = contents(tmp_path / "src")
    answer = without_a_root(tmp_path, farm)
    check_refusal(answer, 6, "is a link", f"--root {tmp_path}/src/vllm apply")
    assert contents(tmp_path / "src") == before


def test_an_editable_install_is_patched_where_its_finder_leads(tmp_path: Path) -> None:
    sources.install("0.29.0", tmp_path / "src")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        init = {str(tmp_path / 'src' / 'vllm' / '__init__.py')!r}\n"
        "        if name == 'vllm':\n"
        "            return importlib.util.spec_from_file_location(name, init)\n"
        "sys.meta_path.append(Finder)\n"
    )
    answer = without_a_root(tmp_path, site)
    assert answer.code == 0, answer.err
    assert f"{tmp_path}/src/vllm" in answer.out


def test_a_checkout_in_the_working_folder_is_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rig.base / "checkout" / "vllm").mkdir(parents=True)
    monkeypatch.chdir(rig.base / "checkout")
    assert "is another vLLM" not in rig.run("status").out  # no package: nothing is imported
    (rig.base / "checkout" / "vllm" / "__init__.py").touch()
    for verb in ("status", "apply", "verify"):
        assert f"{rig.base}/checkout/vllm is another vLLM" in rig.run(verb).out
    monkeypatch.chdir(rig.site)
    assert "is another vLLM" not in rig.run("status").out


def test_namespace_package(tmp_path: Path) -> None:
    sources.install("0.29.0", tmp_path / "one")
    (tmp_path / "one" / "vllm" / "__init__.py").unlink()
    before = contents(tmp_path / "one")
    check_refusal(without_a_root(tmp_path, tmp_path / "one"), 6, "namespace")
    assert contents(tmp_path / "one") == before


def test_a_python_that_does_not_look_beside_the_script(rig: Rig) -> None:
    """As with `python3 -I`, or PYTHONSAFEPATH in an image."""
    answer = rig.spawn("status", env={"PYTHONSAFEPATH": "1"})
    assert answer.code == 1, answer.err
    assert "pristine" in answer.out


def test_overlay_root_below_a_home(rig: Rig) -> None:
    """An image's ENV line is expanded by no shell."""
    place = {**rig.environment, "VISION_EXP_OVERLAY_ROOT": "~/overlay"}
    for code in (0, 0):
        answer = hotfix_rig.call(["--root", str(rig.root), "apply"], place)
        assert answer.code == code, answer.err
    assert "nothing was written" in answer.out
    assert (rig.home / "overlay" / "vision_exp").is_dir()


@pytest.mark.parametrize("kind", ["absent", "a-file", "the-parent"])
def test_root_that_is_no_vllm(rig: Rig, kind: str) -> None:
    root = {"absent": rig.base / "nowhere", "a-file": rig.root / MODEL, "the-parent": rig.site}[
        kind
    ]
    answer = hotfix_rig.call(
        ["--root", str(root), "--overlay-root", str(rig.overlay), "apply"], rig.environment
    )
    check_refusal(answer, 6, str(root))


def test_vllm_that_never_had_the_model(rig: Rig) -> None:
    shutil.rmtree(rig.root / "models")
    before = identity(rig.base)
    answer = rig.run("apply")
    check_refusal(answer, 3, "deepseek_v4")
    assert identity(rig.base) == before
