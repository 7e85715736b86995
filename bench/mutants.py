"""Whether the tests notice faults: makes each fault of the lists in a copy and runs its tests.

    python bench/mutants.py [ROOM ...] [--sample N [--date YYYY-MM-DD]] [--check] [--limit S]
                            [--save] [--again]

The lists are bench/mutants/*.txt, one a room. A list's lines:

    @ FILE | TESTS        the file that the faults below change, and pytest's arguments
                          (NAME=value words in front of them are set in its environment)
    ! TESTS               pytest's arguments for the next fault alone
    # ...                 what a user would see; starts a fault
    - TEXT                text that FILE has exactly once (several lines: `-` before each)
    + TEXT                what is put there instead (none: the text is taken out)
    = REASON              nobody can notice this one: it is counted apart

A fault's tests first have to pass in the copy as it is. Each run is a fork of a process that has
imported what is heavy and not ours, so most take less than a second. Prints made, noticed and
missed for each room, the misses with their text, the machine and the time taken. Exit 1 for fewer
than 95 % noticed; 2 for a place that is not found.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import reporting
from mutant_lists import REPO, Fault, parse, read

__all__ = ["Copy", "Fault", "parse", "prepare", "read"]

WANTED = 0.95
LIMIT_S = 240.0


def check(faults: Iterable[Fault]) -> list[str]:
    """What is wrong with the places of the faults, or with what stands there then."""
    wrong = []
    for fault in faults:
        try:
            changed = fault.change((REPO / fault.file).read_text(encoding="utf-8"))
            if fault.file.endswith(".py"):
                compile(changed, fault.file, "exec", dont_inherit=True)
        except (OSError, ValueError, SyntaxError) as error:
            wrong.append(f"{fault.room}: {error}")
    return wrong


def sample(faults: Sequence[Fault], count: int, date: str) -> list[Fault]:
    """`count` of the faults, others on another day."""
    wanted = [fault for fault in faults if not fault.equivalent]
    return random.Random(date).sample(wanted, min(count, len(wanted)))


class Copy:
    """A copy of the repository's files, in which tests run with one fault at a time."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit
        self.passing: dict[tuple[str, ...], bool] = {}
        names = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.check_output(["git", "-C", REPO, *names], text=True)
        for name in filter(None, listed.split("\0")):
            if (REPO / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / name, folder / name)

    def passes(self, tests: tuple[str, ...]) -> bool:
        """Whether the tests pass without a fault; asked once."""
        if tests not in self.passing:
            self.passing[tests] = self.run(tests) == 0
        return self.passing[tests]

    def notices(self, fault: Fault) -> bool:
        """Whether the fault's tests fail with it, or do not end in time."""
        stock = (self.folder / fault.file).read_text(encoding="utf-8")
        return self.fails(fault.file, fault.change(stock), fault.tests)

    def fails(self, file: str, text: str, tests: tuple[str, ...]) -> bool:
        """Whether tests fail, or do not end in time, where `file` holds `text`."""
        path = self.folder / file
        stock = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            return self.run(tests) != 0
        finally:
            path.write_text(stock, encoding="utf-8")

    def run(self, tests: tuple[str, ...]) -> int:
        """pytest's exit code in a fork of this process; -1 if it did not end in time."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.setsid()
            self._run_here(tests)
        deadline = time.monotonic() + self.limit
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return -1

    def _run_here(self, tests: tuple[str, ...]) -> None:
        import pytest

        os.chdir(self.folder)
        sys.path[:] = [path for path in sys.path if path not in ("", str(REPO))]
        quiet = os.open(os.devnull, os.O_WRONLY)
        report = os.open(self.folder / "report.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(report, 1)
        os.dup2(quiet, 2)
        code = 70
        setting = re.compile(r"([A-Z_]+)=(.*)")
        os.environ.update(found.groups() for one in tests if (found := setting.fullmatch(one)))
        words = [one for one in tests if not setting.fullmatch(one)]
        try:
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *words]))
        finally:
            os._exit(code)


def prepare() -> None:
    """Set this process up for its forks: what is heavy and not ours is imported once for all."""
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VISION_EXP_TEST_CACHE", str(REPO / ".cache"))
    import hypothesis  # noqa: F401
    import libcst  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401


def start_child_python(folder: Path) -> None:
    """Start the Python that tests of the copy in `folder` fork their vLLMs from, once for all."""
    sys.path.insert(0, str(folder / "tests" / "support"))
    import warm

    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    warm._python(tuple((key, offline[key]) for key in warm.AT_IMPORT if key in offline))


def judge(faults: Sequence[Fault], limit: float = LIMIT_S) -> tuple[list[Fault], dict[str, float]]:
    """Makes each fault; gives those that were missed, and the seconds of each by its mark.

    Missed are all of tests that fail without a fault, too. Ctrl-C leaves out what is not run yet.
    """
    prepare()
    missed, took = [], {}
    broken: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder), limit)
        start_child_python(copy.folder)
        with contextlib.suppress(KeyboardInterrupt):
            for fault in faults:
                if fault.equivalent:
                    continue
                start = time.monotonic()
                fails = not copy.passes(fault.tests)
                if fails:
                    broken.add(shlex.join(fault.tests))
                noticed = not fails and copy.notices(fault)
                if not noticed:
                    missed.append(fault)
                took[fault.mark] = round(time.monotonic() - start, 1)
                word = "noticed" if noticed else "MISSED "
                print(f"{word} {took[fault.mark]:6.1f} s  {fault.room}: {fault.seen}", flush=True)
    for tests in sorted(broken):
        print(f"fails without a fault, so its faults count as missed: {tests}")
    return missed, took


def show(faults: Sequence[Fault], missed: Sequence[Fault], seconds: float) -> float:
    """Prints the table and the misses; gives the share that was noticed."""
    made = [fault for fault in faults if not fault.equivalent]
    print(f"\n{'room':<22}{'made':>6}{'noticed':>9}{'missed':>8}{'equivalent':>12}")
    for room in dict.fromkeys(fault.room for fault in faults):
        lost = sum(fault.room == room for fault in missed)
        count = sum(fault.room == room for fault in made)
        same = sum(fault.room == room for fault in faults) - count
        print(f"{room:<22}{count:>6}{count - lost:>9}{lost:>8}{same:>12}")
    share = 1 - len(missed) / max(len(made), 1)
    print(f"{'all':<22}{len(made):>6}{len(made) - len(missed):>9}{len(missed):>8}")
    for fault in missed:
        print(f"\nmissed in {fault.file}: {fault.seen}")
        print("".join(f"  - {line}\n" for line in fault.old), end="")
        print("".join(f"  + {line}\n" for line in fault.new), end="")
    print(
        f"\n{share:.1%} noticed (wanted: {WANTED:.0%}) in {seconds:.0f} s on {os.cpu_count()} cores"
        f", {platform.machine()}, Python {platform.python_version()}"
    )
    return share


def kept(date: str) -> dict[str, dict[str, Any]]:
    """Room -> its row of what `--save` wrote that day."""
    path = reporting.RESULTS / f"mutants-{date}.json"
    found: dict[str, dict[str, Any]] = {}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))["rooms"]
    return found


def save(took: Mapping[str, float], missed: Sequence[Fault]) -> None:
    """Keep a run's rows in the day's file, over what earlier runs of that day left there.

    `took`: mark -> seconds of each fault that was run. A fault that was changed since is not run.
    """
    before = kept(datetime.date.today().isoformat())
    rooms = {}
    for room in dict.fromkeys(fault.room for fault in read()):
        every = [fault for fault in read([room]) if not fault.equivalent]
        old = before.get(room, {"missed": [], "seconds": {}})
        seconds = {**old["seconds"], **took}
        lost = {fault.mark for fault in missed} | {
            one.mark for one in every if one.seen in old["missed"] and one.mark not in took
        }
        run = [fault for fault in every if fault.mark in seconds]
        rooms[room] = {
            "made": len(every),
            "noticed": sum(fault.mark not in lost for fault in run),
            "missed": [fault.seen for fault in run if fault.mark in lost],
            "not run": [fault.seen for fault in every if fault.mark not in seconds],
            "seconds": {fault.mark: seconds[fault.mark] for fault in run},
        }
    reporting.save("mutants", {"rooms": rooms})


def _is_noticed(fault: Fault, row: Mapping[str, Any]) -> bool:
    return fault.mark in row.get("seconds", ()) and fault.seen not in row["missed"]


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rooms", nargs="*")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--check", action="store_true", help="only look for the places")
    parser.add_argument("--only", default="", help="only faults whose file and text match")
    parser.add_argument("--save", action="store_true", help="write the day's file of results")
    parser.add_argument(
        "--again", action="store_true", help="only what that file has as missed or not run"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds for one fault's tests"
    )
    arguments = parser.parse_args()
    faults = read(arguments.rooms)
    faults = [one for one in faults if re.search(arguments.only, f"{one.file} {one.seen}")]
    wrong = check(faults)
    if wrong or arguments.check:
        print("\n".join(wrong) or f"{len(faults)} faults, every place is found once")
        return 2 if wrong else 0
    if arguments.sample:
        faults = sample(faults, arguments.sample, arguments.date)
    if arguments.again:
        found = kept(arguments.date)
        faults = [one for one in faults if not _is_noticed(one, found.get(one.room, {}))]
    start = time.monotonic()
    missed, took = judge(faults, arguments.limit)
    faults = [one for one in faults if one.equivalent or one.mark in took]
    if arguments.save:
        save(took, missed)
    return 0 if show(faults, missed, time.monotonic() - start) >= WANTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
