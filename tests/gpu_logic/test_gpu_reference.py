"""The float32 reference of the GPU checks, at small widths: it agrees with its sources, and the
image rules it adds change what they should."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu.checkpoint import tiny_checkpoint
from gpu.reference import lm as reference_lm
from gpu.reference import vision as reference_vision
from gpu.reference import weights as reference_weights

from vision_exp.config import VisionConfig
from vision_exp.image.transform import ImagePatches
from vision_exp.layout import PLACEHOLDER_ID
from vision_exp.tower import Aligner, VisionTower

SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 128,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "moe_intermediate_size": 128,
    "vision_dim": 128,
    "vision_n_heads": 2,
    "vision_inter_dim": 256,
    "index_head_dim": 128,
    "index_n_heads": 4,
}
GRID = (13, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("vision"), experts=8, **SMALL)


@pytest.fixture(scope="module")
def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def vision(folder: Path, config: dict) -> reference_vision.ReferenceVision:
    return reference_vision.ReferenceVision(folder, config)


@pytest.fixture(scope="module")
def lm(folder: Path) -> reference_lm.ReferenceLM:
    return reference_lm.ReferenceLM(folder)


@pytest.fixture(scope="module")
def image() -> ImagePatches:
    torch.manual_seed(0)
    patches = torch.rand(GRID[0] * GRID[1], 3, 14, 14) * 2 - 1
    return ImagePatches(patches.bfloat16(), GRID, (-(-GRID[0] // 3), -(-GRID[1] // 3)))


@pytest.fixture(scope="module")
def prompt(vision: reference_vision.ReferenceVision, image: ImagePatches) -> reference_lm.Prompt:
    ids = [*range(3, 150), PLACEHOLDER_ID, *range(150, 250)]
    return vision.prompt(ids, [image])


def test_tower_equals_the_overlays_in_float32(
    folder: Path, config: dict, vision: reference_vision.ReferenceVision, image: ImagePatches
) -> None:
    sizes = VisionConfig.from_hf_config(SimpleNamespace(**config))
    tower, aligner = VisionTower(sizes), Aligner(sizes)
    weights = reference_weights.load(folder, lambda name: name.startswith(("vision.", "aligner.")))
    for name, module in (("vision.", tower), ("aligner.", aligner)):
        part = {k.removeprefix(name): v for k, v in weights.items() if k.startswith(name)}
        module.load_state_dict(part, strict=True)
    with torch.inference_mode():
        expected = aligner(tower(image.patches.float(), GRID), GRID)
    found = vision.rows(image.patches, GRID)
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_text_equals_transformers_itself(lm: reference_lm.ReferenceLM, folder: Path) -> None:
    embed = reference_weights.load(folder, lambda name: name == "embed.weight")["embed.weight"]
    ids = torch.arange(3, 203)
    text = torch.zeros(len(ids), dtype=torch.bool)
    found = lm(reference_lm.Prompt(ids, embed[ids], text, []))
    with torch.inference_mode():
        expected = lm.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    assert torch.equal(found.last, expected)
    assert len(found.logits.argmax(-1).unique()) > 20


def test_weights_are_those_of_the_codes(folder: Path) -> None:
    name = "layers.0.ffn.experts.0.w1.weight"
    values = reference_weights.load(folder, lambda n: n.startswith("layers.0.ffn.experts.0.w1"))
    value = values[name]
    assert value.shape == (128, 256)
    mantissas = (value / 2.0 ** torch.floor(torch.log2(value.abs().clamp_min(1e-9)))).abs()
    assert set(mantissas[value != 0].unique().tolist()) == {1.0, 1.5}


def test_prompt_layout(prompt: reference_lm.Prompt) -> None:
    ((start, end),) = prompt.spans
    assert start % 4 == 3
    assert prompt.ids[start] == 129257
    assert prompt.ids[end] == 129261
    assert int((prompt.ids == 129259).sum()) == 5 * 7
    assert int(prompt.image_rows.sum()) == end - 147 + 1


def test_image_rules_move_image_rows_and_nothing_before_them(
    lm: reference_lm.ReferenceLM, prompt: reference_lm.Prompt
) -> None:
    right = lm(prompt)
    first = int(prompt.image_rows.nonzero()[0])
    for other in (lm(prompt, visibility=False), lm(prompt, image_routing=False)):
        moved = (other.last - right.last).norm(dim=-1) / right.last.norm(dim=-1)
        assert float(moved[:first].max()) == 0
        assert float(moved[prompt.image_rows].median()) > 0.05


def test_image_rows_choose_by_bias_vl(
    lm: reference_lm.ReferenceLM, prompt: reference_lm.Prompt
) -> None:
    rows = prompt.image_rows
    with_rule, without = lm(prompt).experts, lm(prompt, image_routing=False).experts
    for layer in range(3):  # the hash layers, where text follows the table
        assert torch.equal(with_rule[layer][~rows], without[layer][~rows])
        assert not torch.equal(with_rule[layer][rows], without[layer][rows])


def test_visible_keys() -> None:
    mask = reference_lm.visible(12, 3, [(4, 8)], "cpu")
    assert mask[3].nonzero().flatten().tolist() == [1, 2, 3]
    assert mask[4].nonzero().flatten().tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert mask[8].nonzero().flatten().tolist() == [4, 5, 6, 7, 8]
    assert mask[9].nonzero().flatten().tolist() == [7, 8, 9]
