"""Bad surroundings: each has an exit code, a first line with the consequence, a next command.

The mounts live in a mount namespace of their own and vanish with the process.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hotfix_rig
import pytest
import sources
from hotfix_rig import Answer, Rig, contents, identity

MODEL = "models/deepseek_v4/nvidia/model.py"
MTP = "models/deepseek_v4/nvidia/mtp.py"
CONFIG = "transformers_utils/configs/deepseek_v4.py"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return hotfix_rig.make(tmp_path / "rig", "0.29.0")


def check_refusal(answer: Answer, code: int, *words: str) -> None:
    assert answer.code == code, answer.err
    for word in words:
        assert word.lower() in answer.err.lower(), word
    assert "nothing was changed" in answer.cause.lower(), "the first line gives the consequence"
    assert "next:" in answer.err, "no next command"
    assert "Traceback" not in answer.err


def inside_mounts(rig: Rig, script: str, *words: str) -> Answer:
    """Run the command line after a shell script, both in a mount namespace of their own."""
    command = [sys.executable, "-B", str(hotfix_rig.HOTFIX), *rig.arguments(*words)]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'set -e\n{script}\nexec "$@"', "sh", *command],
        env=rig.environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


# --- which vLLM -------------------------------------------------------------------------------


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


# --- what is in the target files --------------------------------------------------------------


BAD = "drifted"
BAD_CONTENT = {
    "missing": None,
    "empty": b"",
    "binary": bytes(range(256)) * 64,
    "not-utf-8": "# ägypten\nX = 1\n".encode("latin-1"),
    "syntax-error": b"def broken(:\n",
    "carriage-returns": b"class DeepseekV4Config:\r    pass\r",
    "nul": b"X = 1\0\n",
}


@pytest.mark.parametrize("file", [MODEL, MTP, CONFIG])
@pytest.mark.parametrize("kind", BAD_CONTENT)
def test_bad_target_file(rig: Rig, file: str, kind: str) -> None:
    path = rig.root / file
    content = BAD_CONTENT[kind]
    stock = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content if kind != "syntax-error" else stock + content)
    before = identity(rig.base)
    answer = rig.run("apply")
    check_refusal(answer, 3, Path(file).name)
    assert identity(rig.base) == before
    report = rig.run("--json", "apply")
    assert report.code == report.json["exit"] == 3
    assert report.json["error"]["message"]
    assert report.json["error"]["hint"]
    # Status answers with a plain no, in the same words: it is not refusing anything.
    told = rig.run("--json", "status")
    assert told.code == told.json["exit"] == 1
    assert told.json["error"] == report.json["error"]
    assert told.json["state"] == report.json["state"] == ("missing" if kind == "missing" else BAD)


def test_target_that_is_a_folder(rig: Rig) -> None:
    (rig.root / MTP).unlink()
    (rig.root / MTP).mkdir()
    before = identity(rig.base)
    check_refusal(rig.run("apply"), 3, "mtp.py")
    assert identity(rig.base) == before


# --- where the bytes are ----------------------------------------------------------------------


TOO_MUCH = {
    "brackets": "(" * 3000 + "1" + ")" * 3000,
    "sum": " + ".join(["1"] * 30_000),
    "sum-in-what-this-python-takes": " + ".join(["1"] * 900),
    "and": " and ".join(["a"] * 30_000),
    "conditions": " if a else ".join(["a"] * 900),
    "strings": "1\nclass B:\n def load_weights(self):\n  return " + "'a' " * 2000,
    "sum-before-a-syntax-error": " + ".join(["1"] * 30_000) + "\ndef broken(:",
}


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_source_that_the_parser_could_not_bear(rig: Rig, kind: str) -> None:
    """Refused before LibCST gets it, whose time grows with the square of such nesting."""
    path = rig.root / MTP
    path.write_text(path.read_text() + f"X = {TOO_MUCH[kind]}\n")
    before = contents(rig.base)
    start = os.times()
    # In a process of its own: a parser that overflows its stack takes the process with it.
    answer = rig.spawn("apply")
    check_refusal(answer, 3, MTP)
    assert "parse" in answer.cause
    assert contents(rig.base) == before
    assert rig.spawn("status").code == 1
    took = os.times()
    assert took.children_user - start.children_user < 4, "seconds of two runs"


def test_a_file_that_ends_in_a_carriage_return(rig: Rig) -> None:
    """Rare, and no reason to refuse: its last byte comes back as well."""
    path = rig.root / CONFIG
    path.write_bytes(path.read_bytes().rstrip() + b"\r")
    before = path.read_bytes()
    assert rig.run("apply").code == 0
    assert rig.run("verify").code == 0
    assert rig.run("revert").code == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize("place", ["", "lock", "lock-folder", "undo", "originals"])
def test_state_folder_that_is_not_ours(rig: Rig, tmp_path: Path, place: str, verb: str) -> None:
    """A link there would have files written, or cleared away, where they are none of ours."""
    if verb == "revert":
        assert rig.run("apply").code == 0
    elsewhere, state = tmp_path / "elsewhere", rig.root / ".vision-exp"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("precious")
    odd = state / place.partition("-")[0]
    if odd.is_dir():
        shutil.rmtree(odd)
    odd.parent.mkdir(exist_ok=True)
    if place == "lock-folder":
        odd.mkdir()
    else:
        odd.symlink_to(elsewhere / "file" if place == "lock" else elsewhere)
    before = contents(tmp_path)
    check_refusal(rig.run(verb), 6, ".vision-exp")
    assert contents(tmp_path) == before


def test_hard_link_shared_with_another_environment(rig: Rig) -> None:
    other = rig.base / "other.py"
    other.hardlink_to(rig.root / MODEL)
    before = other.read_bytes()
    answer = rig.run("apply")
    assert answer.code == 0, answer.err
    assert other.read_bytes() == before
    assert b">>> vision-exp:" in (rig.root / MODEL).read_bytes()


def test_symbolic_link_into_another_environment(rig: Rig) -> None:
    other = rig.base / "elsewhere" / "model.py"
    other.parent.mkdir()
    (rig.root / MODEL).rename(other)
    (rig.root / MODEL).symlink_to(other)
    before = contents(rig.base)
    answer = rig.run("apply")
    check_refusal(answer, 6, "link", "model.py")
    assert contents(rig.base) == before


@needs_root
def test_target_that_is_a_mount_point(rig: Rig) -> None:
    before = contents(rig.base)
    model = rig.root / MODEL
    answer = inside_mounts(
        rig, f"cp {model} {rig.base}/mounted\nmount --bind {rig.base}/mounted {model}", "apply"
    )
    check_refusal(answer, 6, "mount", "model.py")
    assert {k: v for k, v in contents(rig.base).items() if k != "mounted"} == before


@needs_root
def test_read_only_file_system(rig: Rig) -> None:
    mount = f"mount --bind {rig.site} {rig.site}\nmount -o remount,bind,ro {rig.site}"
    before = identity(rig.base)
    answer = inside_mounts(rig, mount, "apply")
    check_refusal(answer, 6, "read-only")
    assert identity(rig.base) == before

    assert rig.run("apply").code == 0
    before = identity(rig.base)
    for verb in ("apply", "status", "verify", "doctor"):
        answer = inside_mounts(rig, mount, verb)
        assert answer.code == 0, (verb, answer.err)
    check_refusal(inside_mounts(rig, mount, "revert"), 6, "read-only")
    assert identity(rig.base) == before


@needs_root
@pytest.mark.parametrize("kib", [0, 64, 200])
def test_disk_full(rig: Rig, kib: int) -> None:
    """With nothing free, with room for one file, with room for some."""
    script = f"""
        cp -a {rig.site} {rig.base}/copy
        mount -t tmpfs -o size=16m tmpfs {rig.site}
        cp -a {rig.base}/copy/. {rig.site}
        head -c {kib}k /dev/zero > {rig.site}/room
        dd if=/dev/zero of={rig.site}/filler bs=4k >/dev/null 2>&1 || true
        rm {rig.site}/room
        cd {rig.site}
        find vllm -type f | sort | xargs sha256sum > {rig.base}/before
        set +e
        "$@"
        code=$?
        find vllm -type f | sort | xargs sha256sum | diff - {rig.base}/before >&2 || exit 99
        ls -a vllm/models/deepseek_v4/nvidia > {rig.base}/left
        exit $code
    """
    answer = inside_mounts(rig, script, "apply")
    assert answer.code in (4, 6), answer.err
    assert "no space" in answer.err.lower()
    assert "next:" in answer.err
    left = (rig.base / "left").read_text().split()
    names = [path.name for path in (rig.root / MODEL).parent.iterdir()]
    assert sorted(left) == sorted([".", "..", *names])
    assert not (rig.overlay / "vision_exp").exists()


def without_privilege(rig: Rig, *words: str) -> Answer:
    """As a user to whom file modes matter: root gives up the capabilities that ignore them."""
    prefix = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    command = [sys.executable, "-B", str(hotfix_rig.HOTFIX), *rig.arguments(*words)]
    done = subprocess.run(
        [*(prefix if os.geteuid() == 0 else []), *command],
        env=rig.environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def test_a_target_that_cannot_be_read(rig: Rig) -> None:
    """What is in it cannot be told: no answer (1) and no judgement of the source (3)."""
    (rig.root / MTP).chmod(0)
    before = identity(rig.base)
    told = {verb: without_privilege(rig, verb) for verb in ("apply", "status", "verify")}
    for answer in told.values():
        check_refusal(answer, 6, "mtp.py", "permission")
    assert len({answer.cause for answer in told.values()}) == 1
    assert identity(rig.base) == before


@pytest.mark.parametrize("where", ["nvidia", "configs", "all"])
def test_no_permission(rig: Rig, where: str) -> None:
    folders = {
        "nvidia": [(rig.root / MODEL).parent],
        "configs": [(rig.root / CONFIG).parent],
        "all": [p for p in rig.site.rglob("*") if p.is_dir()],
    }[where]
    for folder in folders:
        folder.chmod(0o555)
    before = identity(rig.base)
    answer = without_privilege(rig, "apply")
    check_refusal(answer, 6, "permi")
    assert identity(rig.base) == before


def test_an_applied_tree_needs_no_permission(rig: Rig) -> None:
    assert rig.run("apply").code == 0
    for path in [rig.site, *rig.site.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    before = identity(rig.base)
    answer = without_privilege(rig, "apply")
    assert answer.code == 0, answer.err
    assert identity(rig.base) == before


# --- the overlay root -------------------------------------------------------------------------


def test_overlay_root_is_made(rig: Rig) -> None:
    deep = Rig(rig.base)
    answer = hotfix_rig.call(
        ["--root", str(deep.root), "--overlay-root", str(rig.base / "a" / "b"), "apply"],
        rig.environment,
    )
    assert answer.code == 0, answer.err
    assert (rig.base / "a" / "b" / "vision_exp" / "install.py").is_file()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o757])
def test_overlay_root_that_others_can_write(rig: Rig, mode: int) -> None:
    rig.overlay.mkdir()
    if mode == 0o775:
        os.chown(rig.overlay, -1, 65534) if os.geteuid() == 0 else None
    rig.overlay.chmod(mode)
    before = identity(rig.base)
    answer = rig.run("apply")
    check_refusal(answer, 6, str(rig.overlay))
    assert identity(rig.base) == before


def test_overlay_root_that_is_not_writable(rig: Rig) -> None:
    rig.overlay.mkdir()
    rig.overlay.chmod(0o555)
    before = identity(rig.base)
    check_refusal(without_privilege(rig, "apply"), 6, str(rig.overlay))
    assert identity(rig.base) == before


def test_overlay_root_that_is_a_file(rig: Rig) -> None:
    rig.overlay.write_text("")
    before = identity(rig.base)
    check_refusal(rig.run("apply"), 6, str(rig.overlay))
    assert identity(rig.base) == before


def test_overlay_folder_of_somebody_else(rig: Rig) -> None:
    """A `vision_exp` that this tool did not stage is not overwritten."""
    (rig.overlay / "vision_exp").mkdir(parents=True)
    (rig.overlay / "vision_exp" / "__init__.py").write_text("MINE = True\n")
    before = identity(rig.base)
    answer = rig.run("apply")
    check_refusal(answer, 3, "vision_exp")
    assert identity(rig.base) == before


@pytest.mark.parametrize("kind", ["dangling", "elsewhere"])
def test_overlay_folder_that_is_a_link(rig: Rig, kind: str) -> None:
    elsewhere = rig.base / "elsewhere"
    if kind == "elsewhere":
        elsewhere.mkdir()
    rig.overlay.mkdir()
    (rig.overlay / "vision_exp").symlink_to(elsewhere)
    before = identity(rig.base)
    answer = rig.run("apply")
    check_refusal(answer, 6, f"is a link to {elsewhere}")
    assert ("which is not there" in answer.cause) == (kind == "dangling")
    assert "written by others" not in answer.err
    assert identity(rig.base) == before


def test_overlay_root_that_is_a_link(rig: Rig) -> None:
    elsewhere = rig.base / "elsewhere"
    elsewhere.mkdir()
    rig.overlay.symlink_to(elsewhere)
    answer = rig.run("apply")
    check_refusal(answer, 6, "is a link to")
    assert f"--overlay-root {elsewhere}" in answer.err


@pytest.mark.parametrize("kind", ["link", "file"])
def test_state_folder_of_the_overlay_that_is_not_ours(rig: Rig, kind: str) -> None:
    rig.overlay.mkdir()
    place = rig.overlay / ".vision-exp"
    place.symlink_to(rig.home) if kind == "link" else place.write_text("")
    before = contents(rig.base)
    check_refusal(rig.run("apply"), 6, str(place))
    assert contents(rig.base) == before


def test_a_file_where_the_overlay_goes(rig: Rig) -> None:
    assert rig.run("apply").code == 0
    shutil.rmtree(rig.overlay / "vision_exp")
    (rig.overlay / "vision_exp").write_text("")
    before = identity(rig.base)
    check_refusal(rig.run("apply"), 3, "vision_exp")
    assert identity(rig.base) == before


@pytest.mark.parametrize("kind", ["dangling", "pipe"])
def test_odd_entries_in_the_staged_overlay(rig: Rig, kind: str) -> None:
    """Never opened: a pipe would wait for ever. Revert works, and leaves what it does not know."""
    assert rig.run("apply").code == 0
    odd = rig.overlay / "vision_exp" / "odd.py"
    odd.symlink_to("nowhere") if kind == "dangling" else os.mkfifo(odd)
    assert rig.spawn("--json", "status").json["state"] == "stale"
    assert rig.spawn("apply").code == (6 if kind == "dangling" else 0)
    assert rig.spawn("revert").code == 0
    assert contents(rig.site) == contents(sources.stock("0.29.0"))


def test_the_folder_of_the_tool_itself_as_overlay_root(rig: Rig, tmp_path: Path) -> None:
    """As when the bundle was unpacked into the overlay root: revert must not eat the tool."""
    tool = tmp_path / "tool"
    for name in ("anchors", "vision_exp"):
        shutil.copytree(hotfix_rig.REPO / name, tool / name)
    shutil.copy(hotfix_rig.HOTFIX, tool)
    for path in [tool, *tool.rglob("*")]:
        path.chmod(0o755)
    shipped = contents(tool / "vision_exp")
    words = ["--root", str(rig.root), "--overlay-root", str(tool)]
    for verb in ("apply", "verify", "revert", "apply", "revert"):
        command = [sys.executable, "-B", str(tool / "hotfix.py"), *words, verb]
        done = subprocess.run(command, env=rig.environment, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert contents(tool / "vision_exp") == shipped
    assert contents(rig.site) == contents(sources.stock("0.29.0"))


@pytest.mark.parametrize(
    "name", ["k\xf6ln", "\U0001f600", "a\nb", 'it\'s "it"', "\udcff", "%s{root}"]
)
def test_names_of_the_overlay_root(rig: Rig, name: str) -> None:
    """What Python reads in the hook is the folder that was staged."""
    root = rig.base / name
    words = ["--root", str(rig.root), "--overlay-root", str(root)]
    assert hotfix_rig.call([*words, "-q", "apply"], rig.environment).code == 0
    roots = [
        ast.literal_eval(keyword.value)
        for node in ast.walk(ast.parse((rig.root / CONFIG).read_bytes()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "root"
    ]
    assert roots == [str(root)]
    shutil.rmtree(rig.root / ".vision-exp")
    plain = hotfix_rig.call(["--root", str(rig.root), "revert"], rig.environment)
    assert plain.code == 0, plain.err
    assert not root.exists(), "revert without a receipt does not find the overlay"


@pytest.mark.parametrize("verb", ["status", "apply", "verify", "revert"])
def test_a_pipe_in_place_of_a_patched_file_is_never_opened(rig: Rig, verb: str) -> None:
    assert rig.run("apply").code == 0
    target = rig.root / MODEL
    target.unlink()
    os.mkfifo(target)
    answer = rig.run(verb)
    if verb == "revert":
        assert answer.code == 0
        assert f"{MODEL} is no longer a file" in answer.out + answer.err
    else:
        assert f"{MODEL} is not a regular file" in answer.out + answer.err
        assert answer.code in (1, 3)


@needs_root
def test_an_owner_that_cannot_be_kept_is_named(rig: Rig) -> None:
    """Files of the user's own, in a group that the user is not in."""
    os.chown(rig.root / MODEL, -1, 12345)
    before = contents(rig.site)
    command = [sys.executable, "-B", str(hotfix_rig.HOTFIX), *rig.arguments("apply")]
    done = subprocess.run(
        ["setpriv", "--bounding-set", "-chown", *command],
        env=rig.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 4, done.stderr
    first = done.stderr.splitlines()[0]
    assert "owner 0:12345 cannot be kept" in first
    assert "Rolled back" in first
    assert contents(rig.site) == before
