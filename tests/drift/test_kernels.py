"""FlashInfer is judged by the table that vLLM and the start ask, in real wheels and broken ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import wheel_files

from anchors.drift import kernels

API = "flashinfer/mla/_sparse_mla_sm120.py"
PACKAGE = "flashinfer/mla/_sparse_mla_sm120/__init__.py"
POLICY = "flashinfer/mla/_sparse_mla_sm120/_policy.py"
PLAN = "flashinfer/mla/_sparse_mla_sm120_plan.py"
TABLE = "_DECODE_DSV4_DISPATCH"


def installed(site: Path, version: str) -> Path:
    """A folder with the Python sources of a published FlashInfer, which may be edited."""

    def wanted(name: str) -> bool:
        return name.startswith("flashinfer/mla/") and name.endswith(".py")

    fetched = wheel_files.fetched("flashinfer-python", version, wanted)
    (site / f"flashinfer_python-{version}.dist-info").mkdir(parents=True)
    (site / "flashinfer" / "mla").mkdir(parents=True)
    for source in (fetched / "flashinfer" / "mla").glob("_sparse_mla_sm120*"):
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, site / "flashinfer" / "mla" / source.name)
    return site


@pytest.mark.parametrize(
    ("version", "verdict", "says"),
    [
        ("0.6.13", "not-applicable", "no sparse MLA for SM12x"),
        ("0.6.14", "applies", "a set of pairs; rows of a draft with no keys"),
        ("0.6.16", "applies", "a set of pairs; rows of a draft with no keys"),
        ("0.6.18", "applies", "a set of pairs; rows of a draft with 192 or 256 keys"),
        ("0.7.0.post1", "applies", "a rule, which only a start can ask; rows of a draft with 192"),
        ("0.7.2.post1", "applies", "a rule, which only a start can ask; rows of a draft with 192"),
        ("0.7.4", "applies", "a rule, which only a start can ask; rows of a draft with 192"),
    ],
)
def test_published_releases(tmp_path: Path, version: str, verdict: str, says: str) -> None:
    entry = kernels.assess(f"flashinfer {version}", str(installed(tmp_path, version)))
    (finding,) = entry["findings"]
    assert (entry["verdict"], finding["verdict"]) == (verdict, verdict)
    assert says in finding["detail"]


@pytest.mark.parametrize(
    ("version", "file", "old", "new", "found"),
    [
        ("0.6.18", API, f"{TABLE} = ", "_DECODE_TABLE = ", "a table that cannot be read"),
        ("0.6.18", API, "512", "448", "no kernel for 512 keys"),
        ("0.6.18", API, f"{TABLE} = frozenset", f"{TABLE} = made", "a table that cannot be read"),
        ("0.7.0.post1", PLAN, "def __contains__", "def takes", "a table that cannot be read"),
        ("0.7.0.post1", API, f"    {TABLE},", "    _OTHER,", f"does not bind {TABLE}"),
        ("0.7.4", PACKAGE, f"    {TABLE},", "    _OTHER,", f"does not bind {TABLE}"),
        ("0.7.4", POLICY, "", None, "a table that cannot be read"),
        ("0.7.4", PACKAGE.rpartition("/")[0], "", None, "no such table"),
    ],
)
def test_a_next_release_that_breaks_it(
    tmp_path: Path, version: str, file: str, old: str, new: str | None, found: str
) -> None:
    site = installed(tmp_path / "a site", version)
    path = site / file
    if new is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        before = path.read_text()
        assert old in before
        path.write_text(before.replace(old, new))
    entry = kernels.assess(str(site), str(site))
    (finding,) = entry["findings"]
    assert entry["verdict"] == finding["verdict"] == "drifted"
    assert found in finding["found"]
    assert finding["next"].endswith(f"python3 hotfix.py drift '{site}'")


def test_what_is_meant_by_a_name(tmp_path: Path) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    for folder in (alone / "flashinfer", both / "flashinfer", both / "vllm"):
        folder.mkdir(parents=True)
    meant = ["flashinfer", "flashinfer==0.7.4", "flashinfer-0.7.0.post1", "flashinfer-python"]
    meant += ["dist/flashinfer_python-0.7.4-py3-none-any.whl", str(alone)]
    assert [name for name in meant if not kernels.is_meant(name)] == []
    for name in ("0.29.0", "latest", "vllm.whl", str(both), "flashinfer.txt"):
        assert not kernels.is_meant(name)
