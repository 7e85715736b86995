"""The Dockerfile, linted and built for real where buildah runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sources

from .conftest import REPO

pytestmark = pytest.mark.xdist_group("bundle")
DOCKERFILE = REPO / "Dockerfile"

# A root file system with a shell and a Python, nothing more.
PACKAGES = (
    "bash",
    "coreutils",
    "dash",
    "findutils",
    "grep",
    "sed",
    "util-linux",
    "mount",
    "libmount1",
    "libblkid1",
    "libuuid1",
    "libselinux1",
    "libpcre2-8-0",
    "libacl1",
    "libattr1",
    "libgmp10",
    "libc6",
    "libc-bin",
    "libgcc-s1",
    "libtinfo6",
    "zlib1g",
    "libexpat1",
    "libbz2-1.0",
    "liblzma5",
    "libffi8",
    "python3-minimal",
)


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    child = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True)
    assert child.returncode == 0, child.stdout


def test_one_layer_of_what_was_verified() -> None:
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    steps = [line.split()[0] for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert steps == ["ARG", "FROM", "USER", "RUN", "FROM", "COPY"]
    assert "run.sh && python3 /tmp/deepseek-v4-vision-exp/hotfix.py verify" in " ".join(
        text.split()
    )


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
        timeout=300,
    )


def checked(*command: str | Path, **environment: str) -> str:
    done = run(*command, **environment)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment in which buildah works in chroot mode, with storage of its own."""
    if os.geteuid() or not shutil.which("apt-get"):
        pytest.skip("NOT RUN: building the image needs root and Debian's packages")
    if not shutil.which("buildah"):
        run("apt-get", "-qq", "update")
        run("apt-get", "-qq", "-y", "--no-install-recommends", "install", "buildah")
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    )
    environment = {
        "CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"),
        "BUILDAH_ISOLATION": "chroot",
    }
    probe = run("buildah", "from", "scratch", **environment) if shutil.which("buildah") else None
    if probe is None or probe.returncode:
        pytest.skip("NOT RUN: buildah does not work on this machine")
    yield environment
    run("buildah", "rm", "--all", **environment)


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    debs, root = tmp_path / "debs", tmp_path / "rootfs"
    debs.mkdir()
    root.mkdir()
    listed = checked("apt-cache", "depends", "--important", "python3-minimal")
    versioned = re.findall(r"Depends: (python3\.\d+-minimal)", listed)[0]
    names = [*PACKAGES, versioned, f"lib{versioned}"]
    names.append(f"lib{versioned.removesuffix('-minimal')}-stdlib")
    done = subprocess.run(["apt-get", "-qq", "download", *names], cwd=debs, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    for deb in debs.iterdir():
        checked("dpkg", "-x", deb, root)
    for folder in ("tmp", "proc", "dev", "root", "opt"):
        (root / folder).mkdir(exist_ok=True)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    version = versioned.removesuffix("-minimal")
    sources.install("0.29.0", root / "usr" / "local" / "lib" / version / "dist-packages")
    return root


def test_an_image_is_built_and_starts_as_a_no_op(
    buildah: dict[str, str], rootfs: Path, mod: Path
) -> None:
    base = checked("buildah", "from", "scratch", **buildah)
    checked("buildah", "copy", base, rootfs, "/", **buildah)
    checked("buildah", "config", "--user", "1234", base, **buildah)
    checked("buildah", "commit", "-q", base, "localhost/base", **buildah)
    built = run(
        "buildah", "build", "--network=none", "--build-arg=BASE_IMAGE=localhost/base",
        "-t", "localhost/patched", mod, **buildah,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    assert "image input for DeepSeek-V4-Flash-Vision-Exp is in place" in built.stdout + built.stderr

    def layers(name: str) -> int:
        form = "{{len .FromImageID}} {{len .OCIv1.RootFS.DiffIDs}}"
        return int(checked("buildah", "inspect", "-f", form, name, **buildah).split()[1])

    assert layers("localhost/patched") == layers("localhost/base") + 1

    user = "{{.OCIv1.Config.User}}"
    assert checked("buildah", "inspect", "-f", user, "localhost/patched", **buildah) == "1234"

    # Started with the mod as well, by that user.
    container = checked("buildah", "from", "localhost/patched", **buildah)
    checked("buildah", "copy", container, mod, "/workspace/mods/m", **buildah)
    call = "cd /workspace/mods/m && bash run.sh && python3 hotfix.py status && id -u"
    again = checked("buildah", "run", container, "--", "bash", "-c", call, **buildah)
    assert "nothing was written" in again
    assert "in /opt/dspark-patches: staged" in again
    assert again.endswith("1234")
