"""A hotfix that is part of an image: its files lie in a lower layer of a real overlayfs mount."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import hotfix_rig
import pytest
from bad_environments import in_container
from hotfix_rig import HOTFIX, contents

# Were a folder of the image to get a rename, the test would show nothing.
_HAS_NO_RENAME = """
import errno, os, sys
try:
    os.rename(sys.argv[1], sys.argv[1] + ".moved")
except OSError as error:
    sys.exit(error.errno != errno.EXDEV)
sys.exit("was renamed")
"""


def test_a_baked_hotfix_is_upgraded_and_reverted(tmp_path: Path) -> None:
    rig = hotfix_rig.make(tmp_path / "image", "0.29.0")
    try:
        tried = in_container(rig, tmp_path / "trial", "true")
    except FileNotFoundError:
        pytest.skip("NOT RUN: no unshare here")
    if tried.returncode:
        pytest.skip(f"NOT RUN: this machine mounts no overlayfs for us: {tried.stderr.strip()}")
    stock = contents(rig.root)
    assert rig.run("apply").code == 0
    baked = contents(rig.base)
    hotfix = shlex.join([sys.executable, str(HOTFIX), *rig.arguments()])
    staged = shlex.quote(str(rig.overlay / "vision_exp"))
    answer = in_container(
        rig,
        tmp_path / "container",
        f"{shlex.quote(sys.executable)} -c {shlex.quote(_HAS_NO_RENAME)} {staged}",
        f"echo '# of an older hotfix' >> {staged}/__init__.py",
        f"{hotfix} apply",
        f"{hotfix} revert",
        f"test ! -e {staged}",
        f"cp -r {shlex.quote(str(rig.root))} {shlex.quote(str(tmp_path / 'left'))}",
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert contents(tmp_path / "left") == stock
    assert contents(rig.base) == baked, "the image itself stays"
