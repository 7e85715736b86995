"""A checkpoint that sees: its prompts, its aligner's directions, and the fits that are refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import tiny_tokenizer
import torch
from gpu.checkpoint import aligner, inplace, memory, noise, sees, tiny_checkpoint
from gpu.checkpoint.ridge import NotFitted, Ridge
from gpu.lib import sights
from gpu.lib.accuracy import Score, as_alone, as_right, differing, score
from gpu.reference.image import patches_of
from gpu.reference.vision import ReferenceVision
from tokenizers import Tokenizer

SMALL = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "head_dim": 128,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "moe_intermediate_size": 128,
    "vocab_size": 1024,
    "vision_dim": 128,
    "vision_n_heads": 2,
    "vision_inter_dim": 128,
    "index_head_dim": 128,
    "index_n_heads": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("sees")
    return tiny_checkpoint.write(
        where, layers=3, experts=8, draft_layers=0, vision_layers=1, **SMALL
    )


@pytest.mark.parametrize("question", sights.QUESTIONS, ids=lambda each: each.name)
def test_prompts_are_those_of_the_test_tokenizer(tmp_path: Path, question: sights.Question) -> None:
    """Merges and special tokens too; the template's text is held in the chat tests."""
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer.write(tmp_path) / "tokenizer.json"))
    parts = [tiny_tokenizer.PLACEHOLDER_TOKEN] * 2 + [question.wording]
    text = "<｜begin▁of▁sentence｜><｜User｜>" + "\n\n".join(parts) + "<｜Assistant｜></think>"
    asked = sights.Asked(question, (0, 1), question.answers[0])
    assert tokenizer.encode(text, add_special_tokens=False).ids == sights.token_ids(asked)
    answers = tokenizer.encode(question.answers[0], add_special_tokens=False).ids
    assert answers == [sights.token(question.answers[0])]


def test_pictures_are_a_function_of_number_and_seed() -> None:
    one, two, other = sights.sight(5, 0), sights.sight(5, 0), sights.sight(5, 1)
    assert one.image.tobytes() == two.image.tobytes() != other.image.tobytes()
    share = sights.coverage(one, 42)
    assert share[:, -1].sum() == pytest.approx(1)
    cell = share[:, -1].argmax()
    columns = -(-one.image.size[0] // 42)
    x, y = (cell % columns + 0.5) * 42, (cell // columns + 0.5) * 42
    width, height = one.image.size
    assert one.cell == int(y // (height / 3)) * 3 + int(x // (width / 3))


def test_the_loudest_direction_is_the_one_sought() -> None:
    wanted = torch.randn(64, generator=torch.Generator().manual_seed(3))
    onto = aligner.directions(64, 0, wanted / wanted.norm())
    assert onto.shape == (64, aligner.TARGETS + 1)
    share, constant, others = onto[:, -2], onto[:, -1], onto[:, :-2]
    torch.testing.assert_close(share, wanted / wanted.norm() * 8)
    torch.testing.assert_close(onto.square().mean(0), torch.ones(aligner.TARGETS + 1))
    torch.testing.assert_close(others.T @ onto[:, -2:], torch.zeros(13, 2), atol=1e-3, rtol=0)
    assert float(share @ constant) / 64 == pytest.approx(-(0.5**0.5), abs=1e-4)


def test_the_aligner_in_the_folder_gives_each_target_along_its_direction(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    pictures = [sights.sight(0, 0, ((392, 392),))]
    eyes = sees.Eyes(ReferenceVision(folder, config), pictures)
    cells = torch.randn(SMALL["hidden_size"] + 1, aligner.TARGETS) / 8
    onto = aligner.directions(SMALL["hidden_size"], 0)
    aligner.lay(folder, eyes.vision, cells, onto)
    patches = patches_of(pictures[0].image, config)
    read = ReferenceVision(folder, config).rows(patches.patches, patches.vit_grid)
    found = read @ onto / SMALL["hidden_size"]
    rows = eyes.features(0)[0]
    wanted = rows @ cells[:-1] + cells[-1]
    wanted = torch.cat((wanted * aligner.GAIN, torch.ones(len(rows), 1)), dim=1)
    wanted[:, -2] *= aligner.SHARE_GAIN / aligner.GAIN
    # The file has BF16: eight bits of each entry.
    assert float((found - wanted).norm() / wanted.norm()) < 0.01


def test_the_head_in_the_folder_has_only_answers_and_the_end(folder: Path) -> None:
    tokens = sees.answer_tokens()
    assert len(set(tokens)) == len(tokens) == 20
    rows = torch.randn(len(tokens), SMALL["hidden_size"])
    sees.write_head(folder, rows)
    head = inplace.read(folder, "head.weight")
    assert torch.equal(head[torch.tensor(tokens)], rows.bfloat16())
    assert int((head != 0).any(dim=1).sum()) == len(tokens)


def test_fp8_keeps_three_bits_of_a_value_and_powers_of_two_whole() -> None:
    values = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    error = (noise.rounded(values) - values).abs() / values.abs()
    assert 0.001 < float(error.median()) < 1 / 16
    exact = torch.exp2(torch.arange(128) % 8 - 4.0)
    assert torch.equal(noise.rounded(exact), exact)


def test_ridge_finds_a_linear_map_and_refuses_nothing_and_infinity() -> None:
    rows = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    ridge, wanted = Ridge(6, 2, "cpu"), torch.arange(12.0).view(6, 2)
    ridge.add(rows, rows @ wanted)
    torch.testing.assert_close(ridge.solve(1e-9), wanted, atol=1e-3, rtol=0)
    with pytest.raises(NotFitted, match="0 rows"):
        Ridge(6, 2, "cpu").solve(1e-3)
    ridge.add(torch.full((1, 6), float("inf")), torch.zeros(1, 2))
    with pytest.raises(NotFitted, match="does not converge.*201 rows"):
        ridge.solve(1e-3)


def test_a_fit_no_better_than_the_commonest_answer_is_refused_with_figures() -> None:
    good = Score(right=0.9, guess=0.125, majority=0.2, count=50)
    sees.check({"colour": good})
    poor = Score(right=0.22, guess=0.11, majority=0.2, count=50)
    with pytest.raises(NotFitted, match=r"cell 22.0% of 50 \(guess 11.0%, majority 20.0%\)"):
        sees.check({"colour": good, "cell": poor})
    with pytest.raises(NotFitted, match="nothing asked"):
        sees.check({})


def test_folders_of_another_kind_are_refused_and_left_alone(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFitted, match="not a checkpoint that sees"):
        sees.read_recipe(folder)
    (tmp_path / "config.json").write_text('{"vision_n_layers": 0}')
    with pytest.raises(NotFitted, match="nothing was changed"):
        sees.fit(tmp_path, sees.Plan(), "cpu")
    assert (tmp_path / "config.json").exists()


def test_too_little_memory_is_refused_with_figures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_n_layers": 1}')
    index = {"metadata": {"total_size": 1 << 50}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(memory.TooLittleMemory, match="may need 8388608.0 GiB"):
        sees.fit(tmp_path, sees.Plan(), "cpu")
    assert (tmp_path / "config.json").exists()


def test_answers_may_differ_a_point_more_than_two_runs_alone() -> None:
    assert differing("abcd", "abce") == 0.25
    assert as_alone(0.26, 0.25) and not as_alone(0.27, 0.25)
    # McNemar: of 100 that one side alone has right, 59 and 41 are chance, 60 and 40 are not.
    assert as_right(59, 41) and not as_right(60, 40) and not as_right(40, 60) and as_right(0, 0)
    assert score("ab", "aa", 4) == Score(0.5, 0.25, 1.0, 2)


def test_the_table_has_every_row_and_fails_with_a_failed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parents[2] / "bench" / "answers.py"
    spec = importlib.util.spec_from_file_location("answers_table", path)
    assert spec and spec.loader
    answers = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = answers
    spec.loader.exec_module(answers)
    rows = [{"name": "alone", "ok": True, "detail": "95 %", "seconds": 1}]
    (tmp_path / "sees_eager.json").write_text(json.dumps(rows))
    assert answers.main([str(tmp_path)]) == 0
    assert "| alone | 95 % | ok |" in capsys.readouterr().out
    rows.append({"name": "8 at once", "ok": False, "detail": "50 %", "seconds": 1})
    (tmp_path / "sees_eager.json").write_text(json.dumps(rows))
    assert answers.main([str(tmp_path)]) == 1
    assert "| 8 at once | 50 % | **FAIL** |" in capsys.readouterr().out
    (tmp_path / "sees_eager.json").unlink()
    assert answers.main([str(tmp_path)]) == 1
    assert "nothing to print" in capsys.readouterr().err
