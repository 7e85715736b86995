"""What run.sh makes of jobs that end badly, with a stand-in for the Python that runs the checks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "gpu" / "run.sh"
#: Writes a good row into every report that it is given; may die before or after that, or hang.
STAND_IN = f"""#!/bin/bash
case $1 in */table.py) exec {sys.executable} "$@" ;; esac
case $1 in */tiny_checkpoint.py) mkdir -p "$2" ;; esac
[ "${{1##*/}}" != "$DIES_AT_ONCE" ] || exit 3
for word in "$@"; do
    case $word in */rows/*.json)
        echo '[{{"name": "a row", "ok": true, "detail": "", "seconds": 0}}]' >"$word" ;;
    esac
done
[ "${{1##*/}}" != "$DIES_LATER" ] || exit 139
[ "${{1##*/}}" != "$HANGS" ] || {{ echo $$ >"$WORK/hanging" && exec sleep 120; }}
"""


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        python = folder / "bin" / "python3"
        python.parent.mkdir()
        python.write_text(STAND_IN)
        python.chmod(0o755)

    def environment(self, **changes: str) -> dict[str, str]:
        folders = {name: str(self.folder / name) for name in ("PIECES", "WORK", "OUT")}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        faults = dict.fromkeys(("DIES_AT_ONCE", "DIES_LATER", "HANGS"), "")
        return {"PATH": path, **faults, **folders, **changes}

    def __call__(self, *stages: str, **changes: str) -> tuple[int, str]:
        command, known = ["bash", str(RUN), *stages], self.environment(**changes)
        done = subprocess.run(command, capture_output=True, text=True, env=known, timeout=120)
        return done.returncode, done.stdout + done.stderr

    def hang(self, stage: str, script: str) -> tuple[subprocess.Popen[bytes], int]:
        """A run in a session of its own whose job has written its row and hangs; the job's pid."""
        mark = self.folder / "WORK" / "hanging"
        running = subprocess.Popen(
            ["bash", RUN, stage],
            env=self.environment(HANGS=script),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            # A shell's background job, as this test may be part of, ignores it, and so would bash.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        until = time.monotonic() + 30
        while not (mark.exists() and mark.read_text().strip()) and time.monotonic() < until:
            time.sleep(0.05)
        return running, int(mark.read_text())

    def pieces(self, name: str, release: str) -> str:
        """A folder with pieces of a tree that has what setup touches."""
        tree, folder = self.folder / f"tree-{name}", self.folder / name
        for file in ("vllm/release", "flashinfer/comm/cuda_ipc.py"):
            (tree / file).parent.mkdir(parents=True)
            (tree / file).write_text(release)
        folder.mkdir()
        with tarfile.open(folder / "piece.aa", "w:gz") as archive:
            archive.add(tree, ".")
        return str(folder)


def session(leader: int) -> list[int]:
    """Its processes, those that were started first before the others."""
    pids = sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if alive(pid) and os.getsid(pid) == leader]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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
        ("kernels", "checks_routing.py", "routing"),
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


def test_a_report_without_rows_fails_the_table(run: Runs) -> None:
    assert run("second")[0] == 0
    (run.folder / "WORK" / "rows" / "reuse.json").write_text("[]")
    code, said = run("table")
    assert code == 1
    assert "NOT RUN  reuse: no row in its report" in said


def test_a_job_that_was_killed_with_the_script_counts_as_cut_off(run: Runs) -> None:
    running, _ = run.hang("server", "checks_server.py")
    for pid in session(running.pid):
        os.kill(pid, signal.SIGKILL)
    running.wait()
    assert (run.folder / "WORK" / "rows" / "server.json").exists()
    code, said = run("kernels", "table")
    assert code == 1
    assert "FAIL     job server: cut off" in said


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_the_jobs(run: Runs, kind: signal.Signals) -> None:
    running, job = run.hang("server", "checks_server.py")
    running.send_signal(kind)
    assert running.wait(timeout=20) == 130
    until = time.monotonic() + 20
    while alive(job) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(job)


def test_a_second_setup_begins_from_nothing(run: Runs) -> None:
    assert run("setup", "kernels", PIECES=run.pieces("first", "one"))[0] == 0
    assert run("setup", PIECES=run.pieces("second", "two"))[0] == 0
    for tree in ("stock", "patched"):
        assert (run.folder / "WORK" / tree / "vllm" / "release").read_text() == "two"
    # Rows of another vLLM are not this one's.
    assert not list((run.folder / "WORK" / "rows").iterdir())


def test_a_setup_without_pieces_ends_the_run(run: Runs) -> None:
    code, said = run("setup", "kernels")
    assert code == 1
    assert f"no piece.* in {run.folder / 'PIECES'}" in said
    assert "kernels: exit" not in said


def test_results_that_cannot_be_packed_fail_the_run(run: Runs) -> None:
    (run.folder / "OUT" / "rows-logs.tgz").mkdir(parents=True)
    code, said = run("table")
    assert code == 1
    assert "[results] FAILED: not packed" in said


@pytest.mark.parametrize(
    ("stages", "changes"),
    [
        ((), {}),
        (("server", "sever"), {}),
        (("all", "two"), {}),
        (("server",), {"PIECES": ""}),
        (("server",), {"OUT": "/dev/null/results"}),
    ],
    ids=["none", "unknown", "all and another", "no pieces named", "no folder for results"],
)
def test_what_is_wrong_with_a_call_is_said_before_anything_runs(
    run: Runs, stages: tuple[str, ...], changes: dict[str, str]
) -> None:
    code, said = run(*stages, **changes)
    assert code == 2
    assert "nothing was run\nnext: PIECES=DIR WORK=DIR OUT=DIR tests/gpu/run.sh STAGE" in said
    assert "setup patch warm first" in said
    assert "exit 0" not in said
