"""What run.sh makes of jobs that end badly, with a stand-in for the Python that runs the checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.sh")
#: Writes a good row into every report that it is given; may die before or after that.
STAND_IN = f"""#!/bin/bash
case $1 in */table.py) exec {sys.executable} "$@" ;; esac
[ "${{1##*/}}" != "$DIES_AT_ONCE" ] || exit 3
for word in "$@"; do
    case $word in */rows/*.json)
        echo '[{{"name": "a row", "ok": true, "detail": "", "seconds": 0}}]' >"$word" ;;
    esac
done
[ "${{1##*/}}" != "$DIES_LATER" ] || exit 139
"""


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        python = folder / "bin" / "python3"
        python.parent.mkdir()
        python.write_text(STAND_IN)
        python.chmod(0o755)

    def __call__(self, *stages: str, **environment: str) -> tuple[int, str]:
        folders = {name: str(self.folder / name) for name in ("PIECES", "WORK", "OUT")}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        known = {"PATH": path, "DIES_AT_ONCE": "", "DIES_LATER": "", **folders, **environment}
        done = subprocess.run(
            ["bash", RUN, *stages], capture_output=True, text=True, env=known, timeout=120
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_jobs_that_end_well(run: Runs) -> None:
    code, said = run("second", "kernels", "figures")
    assert code == 0, said
    assert "FAILED" not in said


@pytest.mark.parametrize(
    ("stage", "script", "job"),
    [
        ("warm", "warm_kernels.py", "warm"),
        ("first", "compare_text.py", "compare-text"),
        ("second", "checks_reuse.py", "reuse"),
        ("kernels", "routing_check.py", "routing"),
        ("server", "checks_server.py", "server"),
        ("figures", "gpu_tower.py", "tower"),
        ("images", "gpu_serving.py", "images"),
    ],
)
def test_a_job_that_dies_after_its_first_row_fails_the_run(
    run: Runs, stage: str, script: str, job: str
) -> None:
    # What runs after it does not hide it.
    code, said = run(stage, "kernels" if stage != "kernels" else "server", DIES_LATER=script)
    assert code == 1
    assert f"== failed: {job} (exit 139)" in said


def test_rows_of_an_earlier_run_do_not_pass_for_new_ones(run: Runs) -> None:
    assert run("second")[0] == 0
    report = run.folder / "WORK" / "rows" / "reuse.json"
    assert report.exists()
    code, said = run("second", DIES_AT_ONCE="checks_reuse.py")
    assert code == 1, said
    assert not report.exists()
    # Also for a table made later, until the job ends well.
    code, said = run("table")
    assert code == 1
    assert "FAIL     job reuse: exit 3" in said
    assert "NOT RUN  reuse: no report" in said


def test_a_job_that_is_run_again_and_ends_well_is_forgiven(run: Runs) -> None:
    assert run("server", DIES_LATER="checks_server.py")[0] == 1
    assert run("kernels")[0] == 1
    assert run("server")[0] == 0


def test_no_time_left_is_a_failure(run: Runs) -> None:
    code, said = run("warm", "server", DEADLINE="0")
    assert code == 1
    assert "[server] FAILED: not run, no time left" in said


def test_a_missing_report_fails_the_table(run: Runs) -> None:
    assert run("second")[0] == 0
    code, said = run("table")
    assert code == 1
    assert "NOT RUN  reference: no report" in said


@pytest.mark.parametrize("stages", [(), ("server", "sever")], ids=["none", "unknown"])
def test_stages_are_known_before_anything_runs(run: Runs, stages: tuple[str, ...]) -> None:
    code, said = run(*stages)
    assert code == 2
    assert "setup patch warm first" in said
    assert "exit 0" not in said
