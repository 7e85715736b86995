"""A fork of the warm Python is as good as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import vllm_rig

# Beside others that use the warm Python, which takes seconds to start.
pytestmark = pytest.mark.xdist_group(f"vllm-{vllm_rig.RELEASES[-1]}")


def run(folder: Path, text: str, *arguments: str, **options: object) -> tuple[int, str, str]:
    script = folder / "script.py"
    script.write_text(text)
    done = vllm_rig.run_child(script, folder, *arguments, **options)  # type: ignore[arg-type]
    return done.returncode, done.stdout, done.stderr


def test_a_script_finds_what_it_would_find_alone(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("here = __file__")
    text = (
        "import json, os, sys, beside\n"
        "vllm = [n for n in sys.modules if n.split('.')[0] in ('vllm', 'vision_exp')]\n"
        "print(json.dumps([__name__, __file__, sys.argv, os.environ['MINE'], beside.here, vllm]))\n"
        "sys.modules['left'] = os.environ['LEFT'] = 'behind'\n"
    )
    script = str(tmp_path / "script.py")
    for mine in ("1", "2"):
        code, out, errors = run(tmp_path, text, "word", env={"MINE": mine})
        assert (code, errors) == (0, "")
        beside = str(tmp_path / "beside.py")
        assert json.loads(out) == ["__main__", script, [script, "word"], mine, beside, []]
    text = (
        "import os, sys; print('left' in sys.modules, 'LEFT' in os.environ, 'torch' in sys.modules)"
    )
    assert run(tmp_path, text)[1] == "False False True\n"


LATE = """import sys, threading, time

def late():
    time.sleep(0.2)
    sys.stderr.write("after the script")

threading.Thread(target=late).start()
"""


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise ValueError('no good')", 1, "ValueError: no good"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'bye')", 0, "bye"),
        ("import sys; sys.exit('no more')", 1, "no more"),
        (LATE, 0, "after the script"),
    ],
)
def test_how_it_ends_is_told(tmp_path: Path, text: str, code: int, told: str) -> None:
    ended, _, errors = run(tmp_path, text)
    assert ended == code
    assert told in errors


def test_vllms_process_for_a_models_class_is_as_good_as_a_new_one(tmp_path: Path) -> None:
    registry = "vllm.model_executor.models.registry"
    module = tmp_path / (registry.replace(".", "/") + ".py")
    module.parent.mkdir(parents=True)
    for folder in list(module.parents)[:3]:
        (folder / "__init__.py").touch()
    module.write_text(
        "import json, os, sys\n"
        "known = [n for n in sys.modules if n.split('.')[0] == 'vision_exp' or n == 'left']\n"
        "warm = 'torch' in sys.modules\n"
        "text = sys.stdin.buffer.read().decode()\n"
        "print(json.dumps([__name__, text, os.environ['MINE'], os.getcwd(), known, warm]))\n"
        "sys.stderr.write('told')\n"
        "sys.exit(4 if text == 'bad' else None)\n"
    )
    script = (
        "import json, os, subprocess, sys\n"
        "sys.modules['left'] = os\n"
        "os.environ['MINE'] = 'changed'\n"
        "for text in (b'good', b'bad'):\n"
        f"    command = [sys.executable, '-m', '{registry}']\n"
        "    done = subprocess.run(command, input=text, capture_output=True)\n"
        "    print(json.dumps([done.returncode, done.stderr.decode()]), done.stdout.decode())\n"
        "print(subprocess.run(['echo', 'other'], capture_output=True).stdout)\n"
    )
    code, out, errors = run(tmp_path, script, env={"MINE": "first"})
    assert (code, errors) == (0, "")
    good, bad, other, *_ = [line for line in out.splitlines() if line]
    decode = json.JSONDecoder().raw_decode
    for line, text, ended in ((good, "good", 0), (bad, "bad", 4)):
        told, end = decode(line)
        assert told == [ended, "told"]
        assert json.loads(line[end:]) == ["__main__", text, "changed", str(Path.cwd()), [], True]
    assert other == "b'other\\n'"


def test_one_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "time.sleep(float(sys.argv[2]))\n"
    )
    pid = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        run(tmp_path, text, str(pid), "600", timeout=2)
    assert gone(int(pid.read_text()))
    assert run(tmp_path, text, str(pid), "0")[0] == 0
    assert gone(int(pid.read_text()))


def gone(pid: int) -> bool:
    """Whether the process has ended, or does so within ten seconds."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        try:
            os.kill(pid, 0)
            if status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
