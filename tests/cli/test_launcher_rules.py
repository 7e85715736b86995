"""`run.sh` around a Python that only notes how it was called: what it passes on and clears away."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hotfix_rig import REPO

PYTHON = """\
#!/bin/bash
if [ "$1" = -c ]; then
    case "$2" in
        *version_info*) exec "{python}" -c "import sys; sys.version_info = {version}; $2" ;;
        *libcst*) exit 1 ;;
    esac
fi
case "$*" in
    *status*) exit 1 ;;
    *bundled.py*) echo "scratch=${{@: -1}}" >>"{log}"; exit {bundled} ;;
    *apply*) echo "path=$PYTHONPATH byte=$PYTHONDONTWRITEBYTECODE" >>"{log}"; exit {code} ;;
esac
exit 1
"""


@pytest.fixture
def run(tmp_path: Path):
    log = tmp_path / "log"
    log.touch()
    (tmp_path / "temporary").mkdir()

    def call(*words: str, version=(3, 12), code: int = 0, bundled: int = 0, **extra: str):
        import sys

        tool = tmp_path / "bin" / "python3"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(
            PYTHON.format(
                python=sys.executable, version=version, log=log, code=code, bundled=bundled
            )
        )
        tool.chmod(0o755)
        done = subprocess.run(
            ["bash", str(REPO / "run.sh"), *words],
            env={
                "PATH": f"{tool.parent}:/usr/bin:/bin",
                "TMPDIR": str(tmp_path / "temporary"),
                **extra,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not list((tmp_path / "temporary").iterdir()), "the scratch folder is left"
        return done, log.read_text()

    return call


@pytest.mark.parametrize("code", [0, 3, 5])
def test_apply_sees_the_scratch_folder_before_the_callers_path(run, code: int) -> None:
    done, log = run(code=code, PYTHONPATH="/callers")
    assert done.returncode == code
    scratch = log.partition("scratch=")[2].splitlines()[0]
    assert f"path={scratch}:/callers byte=1\n" in log


def test_no_empty_entry_where_the_caller_has_no_path(run) -> None:
    done, log = run()
    assert done.returncode == 0
    assert "path=/" in log and ": byte" not in log


@pytest.mark.parametrize("version", [(3, 9), (2, 7)])
def test_an_older_python_is_refused(run, version: tuple[int, int]) -> None:
    done, log = run(version=version)
    assert (done.returncode, log) == (6, "")
    assert "older than 3.10" in done.stderr
    assert "Nothing was changed" in done.stderr


def test_libcst_that_nothing_provides_is_a_refusal(run) -> None:
    done, log = run(bundled=1)
    assert done.returncode == 6
    assert "byte=" not in log
    assert "next: python3 -m pip install libcst" in done.stderr


def test_words_that_nobody_knows(run) -> None:
    done, log = run("--other")
    assert (done.returncode, log) == (2, "")
    assert "usage" in done.stderr


def test_a_step_that_fails_ends_the_sandbox(run, tmp_path: Path) -> None:
    """The release cannot be named: nothing goes on with an empty name."""
    done, log = run("--sandbox", str(tmp_path / "box"))
    assert done.returncode == 1
    assert not log
    assert not (tmp_path / "box").exists()
