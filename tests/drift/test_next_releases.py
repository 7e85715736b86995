"""Synthetic next releases: each gets the right verdict and names the right cause."""

from __future__ import annotations

import pytest
from next_releases import CASES, Next

from anchors.drift.causes import parts

from .conftest import edit_tree, run
from .test_matrix import words

pytestmark = pytest.mark.xdist_group("drift")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict, dict[str, str]]]:
    """Case -> (its entry in the result, its row of the matrix); all trees are judged in one run."""
    folder = tmp_path_factory.mktemp("next")
    trees = [
        str(edit_tree(folder / str(number), case.base, case.edits))
        for number, case in enumerate(CASES)
    ]
    code, result = run(*trees)
    rows = words(result)
    assert code == 1
    assert [entry["tree"] for entry in result["trees"]] == trees
    return {
        case.name: (entry, rows[entry["tree"]])
        for case, entry in zip(CASES, result["trees"], strict=True)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_next_release(case: Next, judged: dict[str, tuple[dict, dict[str, str]]]) -> None:
    entry, row = judged[case.name]
    if case.native:
        assert set(row.values()) == {"superseded"}
        assert entry["verdict"] == "superseded"
        return
    assert tuple(column for column, verdict in row.items() if verdict == "drifted") == case.drifted
    assert entry["verdict"] == ("drifted" if case.drifted else "applies")
    findings = [f for f in entry["findings"] if f["verdict"] == "drifted"]
    told = "\n".join(
        "\n".join(part[key] for part in parts(f) for key in ("expected", "found", "detail"))
        + "\n".join(["", *f["candidates"], f["diff"]])
        + f"\nsince {f['since']} applied in {f['last_good']}"
        for f in findings
    )
    assert len(findings) == (case.findings if case.drifted else 0), told
    for text in case.says:
        assert text in told, told
    for finding in findings:
        assert finding["last_good"] == case.base
        assert f"python3 hotfix.py drift {entry['tree']}" in finding["next"]
