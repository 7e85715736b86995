"""What the tests of bad environments share: each has an exit code, a first line with the
consequence, and a next command.

The mounts live in a mount namespace of their own and vanish with the process.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hotfix_rig import Answer, Rig

MODEL = "models/deepseek_v4/nvidia/model.py"
MTP = "models/deepseek_v4/nvidia/mtp.py"
CONFIG = "transformers_utils/configs/deepseek_v4.py"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def check_refusal(answer: Answer, code: int, *words: str) -> None:
    assert answer.code == code, answer.err
    for word in words:
        assert word.lower() in answer.err.lower(), word
    assert "nothing was changed" in answer.cause.lower(), "the first line gives the consequence"
    assert "next:" in answer.err, "no next command"
    assert "Traceback" not in answer.err


def inside_mounts(rig: Rig, script: str, *words: str) -> Answer:
    """Run the command line after a shell script, both in a mount namespace of their own."""
    shell = f'set -e\n{script}\nexec "$@"'
    return rig.spawn(*words, before=["unshare", "-m", "sh", "-c", shell, "sh"])


def without_privilege(rig: Rig, *words: str) -> Answer:
    """As a user to whom file modes matter: root gives up the capabilities that ignore them."""
    prefix = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    return rig.spawn(*words, before=prefix if os.geteuid() == 0 else ())


_MOUNT = "mount -t overlay overlay -o redirect_dir=off,lowerdir={0},upperdir={1},workdir={2} {0}"


def in_container(rig: Rig, layer: Path, *commands: str) -> subprocess.CompletedProcess[str]:
    """Runs commands where the tree is an image's, and what they write goes to `layer`."""
    for name in ("upper", "work"):
        (layer / name).mkdir(parents=True, exist_ok=True)
    mount = _MOUNT.format(rig.base, layer / "upper", layer / "work")
    script = " && ".join([mount, *commands])
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env=rig.environment,
        capture_output=True,
        text=True,
        check=False,
    )
