"""The mod as root in a bare container, as a plain user in an own environment, as a random user of
a cluster, and on a read-only file system. The mounts vanish with the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sources
from bad_environments import CONFIG, check_refusal
from hotfix_rig import Answer, contents

pytestmark = [
    pytest.mark.xdist_group("bundle"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("setpriv") or sys.base_prefix.startswith("/opt"),
        reason="NOT RUN: needs root, setpriv and a Python outside /opt",
    ),
]
USER, RANDOM = 12345, 1000660000
# Reading is allowed everywhere, since this machine's Python may lie in root's home. Writing is not.
_AS_USER = "setpriv --reuid={0} --regid={1} --clear-groups --inh-caps +dac_read_search"
_AS_USER += " --ambient-caps +dac_read_search --bounding-set -all,+dac_read_search"
_OWN_OPT = "mount -t tmpfs none /opt"
# What vLLM does when it imports the patched file, with nothing else of vLLM.
_IMPORT = """\
import sys, types
root, path = sys.argv[1:]
package = sys.modules["vllm"] = types.ModuleType("vllm")
package.__file__ = root + "/__init__.py"
class DeepseekV4Config:
    def __init__(self, **fields): pass
text = open(root + "/" + path).read()
hook = text[text.index("# >>> vision-exp:config-hook"):]
exec(hook, {"__name__": "vllm.config", "DeepseekV4Config": DeepseekV4Config})
try:
    DeepseekV4Config(vision_n_layers=24)
    print("serves")
except RuntimeError as error:
    print(error)
except ImportError as error:
    assert "vision_exp.install" in sys.modules, error
    print("serves")  # it goes on to vLLM itself, which is not here
"""


@dataclass(frozen=True)
class Container:
    """The unpacked bundle in a bare folder, and an environment with a vLLM."""

    base: Path

    @property
    def site(self) -> Path:
        return next(self.base.glob("env/lib/python*/site-packages"))

    @property
    def beside(self) -> Path:
        return self.site / "dspark-patches"

    def own(self, user: int) -> None:
        """Hands the environment to this user."""
        for path in (self.base / "env", *(self.base / "env").rglob("*")):
            os.chown(path, user, user, follow_symlinks=False)

    def call(self, line: str, *, user: int = 0, group: int | None = None, mounts: str = "true",
             home: str = "/") -> Answer:  # fmt: skip
        """`sh -c LINE` as this user in the mod's folder, with these mounts."""
        become = _AS_USER.format(user, user if group is None else group) if user else ""
        path = f"{self.base}/env/bin:/usr/bin:/bin"
        outer = f'{mounts} && exec {become} env -i HOME={home} PATH={path} sh -c "$1"'
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", outer, "sh", line],
            cwd=self.base / "mod",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def serve(self, user: int) -> str:
        """What a server of this user gets from the patched file."""
        (self.base / "serve.py").write_text(_IMPORT)
        answer = self.call(f"python3 -B ../serve.py {self.site}/vllm {CONFIG}", user=user)
        assert answer.code == 0, answer.err
        return answer.out.strip()


@pytest.fixture
def box(bundle: Path) -> Iterator[Container]:
    """Not in pytest's folder, which others than its user cannot enter."""
    with tempfile.TemporaryDirectory(prefix="vision-exp-rights-") as folder:
        base = Path(folder)
        base.chmod(0o755)
        venv.create(base / "env", with_pip=False, symlinks=True)
        with zipfile.ZipFile(bundle) as archive:
            archive.extractall(base / "mod")
        made = Container(base)
        sources.install("0.29.0", made.site)
        yield made


def test_root_in_a_bare_container(box: Container) -> None:
    line = "bash run.sh && stat -c %u-%a /opt/dspark-patches/vision_exp && ls /opt/dspark-patches"
    answer = box.call(line, mounts=_OWN_OPT)
    assert answer.code == 0, answer.err
    assert "in /opt/dspark-patches: staged" in answer.out
    assert "0-755" in answer.out
    assert not box.beside.exists()


def test_a_plain_user_in_an_own_environment(box: Container) -> None:
    box.own(USER)
    stock = contents(box.site)
    answer = box.call("umask 002; bash run.sh", user=USER)
    assert answer.code == 0, answer.err
    assert f"in {box.beside}: staged" in answer.out
    again = box.call("bash run.sh && python3 hotfix.py verify", user=USER)
    assert again.code == 0, again.err
    assert "nothing was written" in again.out
    # A server of somebody else takes it too: the user could have written all of that vLLM.
    assert box.serve(RANDOM) == box.serve(0) == box.serve(USER) == "serves"
    os.chown(box.beside / "vision_exp", USER + 1, USER + 1)
    assert "RuntimeError: others than root" in box.serve(RANDOM)
    refused = box.call("python3 hotfix.py status", user=USER)
    assert refused.code != 0
    os.chown(box.beside / "vision_exp", USER, USER)
    # Root judges the same tree alike, and takes all of it out.
    assert box.call("python3 hotfix.py status").code == 0
    assert box.call("bash run.sh; python3 hotfix.py -q revert", user=USER).code == 0
    assert contents(box.site) == stock


def test_a_random_user_is_told_to_bake(box: Container) -> None:
    stock = contents(box.site)
    answer = box.call("bash run.sh", user=RANDOM, group=0)
    check_refusal(answer, 6, "belongs to user 0", "bake it into the image", "Dockerfile")
    assert contents(box.site) == stock
    # Baked by root, it serves for that user.
    overlay = f"VISION_EXP_OVERLAY_ROOT={box.base}/overlay"
    assert box.call(f"{overlay} bash run.sh").code == 0
    assert box.serve(RANDOM) == "serves"
    again = box.call("bash run.sh", user=RANDOM, group=0)
    assert (again.code, again.err) == (0, "")
    assert "nothing was written" in again.out


def test_a_read_only_root(box: Container) -> None:
    stock = contents(box.site)
    mounts = "mount -t tmpfs none /dev/shm && mount -o remount,bind,ro /"
    answer = box.call("TMPDIR=/dev/shm bash run.sh", mounts=mounts)
    check_refusal(answer, 6, "read-only", "bake it into the image")
    answer = box.call("bash run.sh", mounts="mount -o remount,bind,ro /")
    assert answer.code == 6
    assert "no temporary folder can be made. Nothing was changed." in answer.cause
    assert contents(box.site) == stock
