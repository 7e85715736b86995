"""What the GPU checks conclude from answers co-batched and from launches, without a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu.jobs import checks_server, compare_text
from gpu.lib import answers, cobatched
from gpu.lib.cobatched import Cobatched, Rows


def row(index: int, by: float = 0.0) -> dict[int, float]:
    """First token's log-probabilities of request ``index``: 2 nats or more from any other's."""
    return (
        {0: -1.0 + by, 1: -1.0 - by, 2: -9.0, 3: -9.0}
        | {4 + index: -5.0, 12: -9.0}
        | {4 + i: -9.0 for i in range(8) if i != index}
    )


def requests(*moved: float, lone: float = 0.1) -> Cobatched:
    """Eight requests, four answers each alone, and one co-batched per entry of ``moved``."""
    alone = [[row(i, lone * turn) for turn in range(4)] for i in range(8)]
    return Cobatched(alone, [[row(i, -by) for by in moved] for i in range(8)])


def test_pictures_may_move_by_what_texts_move_by() -> None:
    texts = requests(0.3, 0.5, 0.2)
    assert cobatched.assess_cobatched(requests(0.4, 0.4, 0.5), texts)[0]
    assert not cobatched.assess_cobatched(requests(0.4, 0.4, 0.6), texts)[0]
    limit = requests(0.0, 0.0, 0.0, lone=0.3)
    assert cobatched.assess_cobatched(requests(0.4, 0.4, 0.5), limit)[0], (
        "repeats of a text alone count"
    )


def test_two_answers_may_pass_the_largest_of_few() -> None:
    texts, images = requests(0.3, 0.3, 0.3), requests(0.2, 0.2, 0.2)
    for index in range(2):
        images.together[index][0] = row(index, -0.8)
        assert cobatched.assess_cobatched(images, texts)[0]
    images.together[2][0] = row(2, -0.8)
    good, words = cobatched.assess_cobatched(images, texts)
    assert not good
    assert "21 answers within" in words


def test_answers_to_another_picture_are_found() -> None:
    texts = requests(0.3, 0.3, 0.3)
    for swapped in (2, 4):
        images = requests(0.1, 0.1, 0.1)
        for index in range(0, swapped, 2):
            one, two = images.together[index], images.together[index + 1]
            one[0], two[0] = two[0], one[0]
        good, words = cobatched.assess_cobatched(images, texts)
        assert good is (swapped == 2)
        assert f"image alone: {24 - swapped} of 24, 22 needed (texts 24)" in words


def test_answers_nearer_to_another_picture_count_though_they_moved_little() -> None:
    texts, images = requests(0.3, 0.3, 0.3, lone=0.3), requests(0.0, 0.0, 0.0)
    images.alone[1][:] = [row(0, 1.0 + 0.1 * turn) for turn in range(4)]
    images.together[1][:] = [row(0, 1.0)] * 3
    assert cobatched.assess_cobatched(images, texts)[0]
    images.together[0][:] = [row(0, 0.9)] * 3
    good, words = cobatched.assess_cobatched(images, texts)
    assert not good
    assert "image alone: 21 of 24, 22 needed" in words and "24 answers within" in words


def test_pictures_need_be_no_surer_than_texts() -> None:
    texts, images = requests(0.3, 0.3, 0.3), requests(0.1, 0.1, 0.1)
    for index in range(3):
        texts.together[index][0] = row(7)
    assert texts.own() == 21
    for index in range(2):
        images.together[index][0] = row(7)
    assert "22 of 24, 19 needed" in cobatched.assess_cobatched(images, texts)[1]
    images.together[2][0] = row(7)
    assert "21 of 24, 19 needed" in cobatched.assess_cobatched(images, texts)[1]


def test_pictures_that_are_not_told_apart_alone_prove_nothing() -> None:
    texts, images = requests(0.3, 0.3, 0.3), requests(0.1, 0.1, 0.1)
    images.alone[3][2] = row(5)
    good, words = cobatched.assess_cobatched(images, texts)
    assert not good
    assert "undecidable, repeats alone" in words
    assert images.distinguished() < 32 == requests(0.1).distinguished()


def test_texts_that_company_confuses_prove_nothing() -> None:
    texts = requests(0.3, 0.3, 0.3)
    for index in range(5):
        texts.together[index][0] = row(7)
    good, words = cobatched.assess_cobatched(requests(0.1, 0.1, 0.1), texts)
    assert not good
    assert "undecidable, texts" in words


def test_texts_that_move_as_far_as_another_picture_excuse_nothing() -> None:
    good, words = cobatched.assess_cobatched(
        requests(0.1, 0.1, 0.1), requests(0.1, 0.1, 0.1, lone=2.0)
    )
    assert not good
    assert "undecidable, another image" in words


def test_another_picture_must_be_further_away_than_the_same_again() -> None:
    same = [row(1, 0.0), row(1, 0.2)]
    assert checks_server.assess_client(same, [row(2), row(3)])[0]
    assert not checks_server.assess_client(same, [row(2), row(1, 0.1)])[0]
    assert not checks_server.assess_client([row(1), row(2)], [row(3)])[0]


def test_a_server_must_list_all_the_tokens_that_were_asked_for() -> None:
    told = [(f"token_id:{token}", -float(token)) for token in answers.PROBED]
    assert checks_server.by_id(told)[7] == -7.0
    with pytest.raises(ValueError, match="255 alternatives"):
        checks_server.by_id(told[1:])
    with pytest.raises(ValueError, match="257 alternatives"):
        checks_server.by_id([*told, ("token_id:1000", -1.0)])


def test_the_server_checks_run_where_there_is_no_overlay() -> None:
    """They also run on the stock tree: nothing of vision_exp may be imported with them."""
    code = "import sys; import gpu.jobs.checks_server; sys.exit('vision_exp' in sys.modules)"
    tests = Path(__file__).resolve().parents[1]
    child = [sys.executable, "-c", code]
    subprocess.run(child, env=os.environ | {"PYTHONPATH": str(tests)}, cwd=tests, check=True)


def test_eight_pictures_are_eight() -> None:
    assert len({checks_server.coloured(index) for index in range(8)}) == 8


START, PAD, IMAGE, END = 129257, 129258, 129259, 129261


def prompt(seed: int, count: int = 4) -> Rows:
    """Three text rows, then an image."""
    torch.manual_seed(seed)
    ids = torch.tensor([seed, 7, 8, PAD, START, *[IMAGE] * count, END])
    return Rows(torch.randn(len(ids), 16), ids)


def together(*prompts: Rows) -> Rows:
    return Rows(torch.cat([p.values for p in prompts]), torch.cat([p.ids for p in prompts]))


def test_a_prompt_is_found_where_it_lies_in_a_step() -> None:
    ids = torch.tensor([1, 2, 3, 1, 2, 4])
    assert cobatched.place(ids, torch.tensor([1, 2, 4])) == slice(3, 6)
    assert cobatched.place(ids, ids) == slice(0, 6)
    for part in ([1, 2], [5], [1, 2, 3, 1, 2, 4, 5]):
        with pytest.raises(ValueError, match="times at once"):
            cobatched.place(ids, torch.tensor(part))


def test_rows_in_company_are_those_alone() -> None:
    alone = {"a": prompt(1), "b": prompt(2)}
    off = {name: Rows(rows.values + 1.0, rows.ids) for name, rows in alone.items()}
    both = together(alone["b"], alone["a"])
    good, words = cobatched.same_rows(alone, both, off, limit=0.02)
    assert good
    assert "a: 7 image rows at most 0 off" in words
    for place, moved in ((14, 1.01), (14, 1.05), (18, 1.05), (11, 1.05), (0, math.nan)):
        values = both.values.clone()
        values[place] *= moved
        good, _ = cobatched.same_rows(alone, Rows(values, both.ids), off, limit=0.02)
        assert good is (moved == 1.01), (place, moved)


def test_the_feature_off_must_show_in_the_rows() -> None:
    alone = {"a": prompt(1), "b": prompt(2)}
    off = {name: Rows(rows.values + 1.0, rows.ids) for name, rows in alone.items()}
    off["b"] = Rows(alone["b"].values * 1.1, alone["b"].ids)
    assert not cobatched.same_rows(alone, together(*alone.values()), off, limit=0.02)[0]
    off["b"] = prompt(3)
    with pytest.raises(ValueError, match="another prompt"):
        cobatched.same_rows(alone, together(*alone.values()), off, limit=0.02)


def test_rows_of_text_alone_prove_nothing() -> None:
    text = Rows(torch.ones(3, 2), torch.tensor([1, 2, 3]))
    assert not cobatched.same_rows({"a": text}, text, {"a": text}, limit=0.02)[0]


def test_streams_that_start_together_may_change_places() -> None:
    stock = [["a", "b"], ["c", "c"], ["d"]]
    assert compare_text.kernel_lists(stock, [["a", "b"], ["d"], ["c", "c"]])[0]
    assert not compare_text.kernel_lists(stock, [["b", "a"], ["c", "c"], ["d"]])[0]
    assert not compare_text.kernel_lists(stock, [["a", "b"], ["c"], ["c", "d"]])[0]
    assert compare_text.changes(stock, [["d"], ["a", "x", "b"], ["c", "c"]]) == (["x"], [])
    assert compare_text.changes(stock, [["a", "b"], ["c", "c"]]) == ([], ["d"])


def greedy(*steps: tuple[float, float]) -> answers.Answer:
    """Two tokens' log-probabilities at each step; the likelier one is taken."""
    choices = [dict(enumerate(chances)) for chances in steps]
    return answers.Answer([max(row, key=row.__getitem__) for row in choices], choices)


def test_an_answer_may_part_from_repeats_by_their_own_noise() -> None:
    repeats = [greedy((-1.0, -2.0), (-0.7, -0.8)), greedy((-1.0, -2.0), (-0.9, -0.6))]
    noise = answers.noise_of([repeats])
    assert abs(noise - 0.4) < 1e-9
    assert answers.as_repeated(repeats[1], repeats[:1], 0.0)[0] is False
    assert answers.as_repeated(repeats[1], repeats, 0.0)[0]
    assert answers.as_repeated(greedy((-1.0, -2.0), (-0.8, -0.6)), repeats[:1], noise)[0]
    assert not answers.as_repeated(greedy((-2.0, -1.0), (-0.7, -0.8)), repeats, noise)[0]
