"""What ranks compare before a model is built; two real ones do in in_vllm/two_ranks.py."""

from __future__ import annotations

from unittest import mock

import pytest

from vision_exp import install
from vision_exp.model import ranks


def test_equal_ranks_pass() -> None:
    ranks.compare([("a", "p")])
    ranks.compare([("a", "p"), ("a", "p")])


@pytest.mark.parametrize("other", [("b", "p"), ("a", "q"), ("b", "q")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_differs_is_named(other: tuple[str, str], place: int) -> None:
    found = [("a", "p"), ("a", "p")]
    found.insert(place, other)
    with pytest.raises(ranks.RankMismatchError, match="different code") as told:
        ranks.compare(found)
    for rank, (overlay, plan) in enumerate(found):
        assert f"rank {rank}: overlay {overlay}, plan {plan}" in str(told.value)


def test_a_rank_says_what_its_process_was_hooked_with() -> None:
    own = install.Installed(plan="p", overlay="o")
    with (
        mock.patch.object(install, "installed", own),
        mock.patch.object(ranks, "gather_all", side_effect=lambda config, said: [said] * 2) as all_,
    ):
        ranks.check("config")
    all_.assert_called_once_with("config", ("o", "p"))
    assert ranks.gather("mine", None, 1) == ["mine"]
