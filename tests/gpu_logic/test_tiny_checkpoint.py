"""The small checkpoint has the released names, layouts and dtypes; its seed decides its bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from gpu.checkpoint import tensors as checkpoint_tensors
from gpu.checkpoint import tiny_checkpoint
from safetensors import safe_open

SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 128,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "moe_intermediate_size": 128,
    "vocab_size": 1024,
    "vision_dim": 128,
    "vision_n_heads": 2,
    "vision_inter_dim": 256,
    "index_head_dim": 128,
    "index_n_heads": 4,
}


def _load(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("vision"), experts=8, **SMALL)


def test_names_at_full_size_are_those_of_the_release() -> None:
    full = {"layers": 43, "experts": 256}
    vision = tiny_checkpoint.config_json(vision_layers=32, **full)
    text = tiny_checkpoint.config_json(vision_layers=0, **full)
    assert vision["compress_ratios"] == [0, 0] + [4, 128] * 20 + [4, 0, 0, 0]
    assert vision["dspark_target_layer_ids"] == [40, 41, 42]
    names = [spec.name for spec in checkpoint_tensors.specs(vision)]
    plain = {spec.name for spec in checkpoint_tensors.specs(text)}
    assert len(names) == len(set(names)) == 72633
    assert plain < set(names)
    assert len(set(names) - plain) == 316


def test_shapes_of_the_vision_part() -> None:
    config = tiny_checkpoint.config_json(vision_layers=32)
    shape = {spec.name: spec.shape for spec in checkpoint_tensors.specs(config)}
    assert shape["vision.patch_embed.proj.weight"] == (1024, 588)
    assert shape["vision.blocks.31.mlp.w1.weight"] == (5632, 1024)
    assert shape["vision.blocks.31.attn.wqkv.bias"] == (3072,)
    assert shape["aligner.w1.weight"] == (4096, 9216)
    assert shape["image_newline"] == (4096,)
    assert shape["layers.4.ffn.gate.bias_vl"] == shape["mtp.2.ffn.gate.bias_vl"] == (32,)


def test_index_config_and_files_agree(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    tensors = _load(folder)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    for spec in checkpoint_tensors.specs(config):
        assert tensors[spec.name].shape == spec.shape, spec.name
        assert tensors[spec.name].dtype == spec.dtype, spec.name


def test_same_seed_same_bytes_other_seed_other_bytes(folder: Path, tmp_path: Path) -> None:
    again = _load(tiny_checkpoint.write(tmp_path / "a", experts=8, **SMALL))
    other = _load(tiny_checkpoint.write(tmp_path / "b", experts=8, seed=1, **SMALL))
    first = _load(folder)
    assert all(torch.equal(_bits(first[name]), _bits(again[name])) for name in first)
    same = [name for name in first if torch.equal(_bits(first[name]), _bits(other[name]))]
    # A scale of one block is one of two exponents, so a few single-block scales may agree.
    assert all(first[name].numel() <= 8 for name in same), same


def test_text_only_checkpoint_is_the_language_model_of_the_vision_one(
    folder: Path, tmp_path: Path
) -> None:
    text_folder = tiny_checkpoint.write(tmp_path, experts=8, vision_layers=0, **SMALL)
    config = json.loads((text_folder / "config.json").read_text())
    assert "vision_n_layers" not in config
    assert config["rms_norm_eps"] == 1e-6
    vision, text = _load(folder), _load(text_folder)
    assert all(torch.equal(_bits(vision[name]), _bits(value)) for name, value in text.items())


def test_a_checkpoint_replaces_an_earlier_one(tmp_path: Path) -> None:
    tiny_checkpoint.write(tmp_path, experts=8, **SMALL)
    tiny_checkpoint.write(tmp_path, experts=8, vision_layers=0, **SMALL)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(_load(tmp_path)) == set(index["weight_map"])


def test_what_is_cut_off_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint.write(tmp_path, experts=8, **SMALL)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny_checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        tiny_checkpoint.write(tmp_path, experts=8, seed=1, **SMALL)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("counts", [{"experts": 5}, {"experts": 8, "vision_layers": -1}])
def test_counts_of_no_checkpoint_are_refused(tmp_path: Path, counts: dict[str, int]) -> None:
    folder = tmp_path / "new"
    with pytest.raises(ValueError, match=r"experts, of which a token chooses 6|-1 layers"):
        tiny_checkpoint.write(folder, **counts, **SMALL)
    assert not folder.exists()


def test_scaled_weights_keep_the_size_of_a_row(folder: Path) -> None:
    tensors = _load(folder)
    for name in ("layers.0.attn.wq_b", "layers.3.ffn.shared_experts.w2"):
        weight = tensors[f"{name}.weight"].float()
        scale = tensors[f"{name}.scale"].float()
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        gain = float((weight * scale).square().mean().sqrt()) * math.sqrt(weight.shape[1])
        assert 0.6 < gain < 1.7, (name, gain)


def test_hash_table_rows_hold_distinct_experts(folder: Path) -> None:
    table = _load(folder)["layers.0.ffn.gate.tid2eid"]
    assert table.min() >= 0
    assert table.max() < 8
    assert all(len(set(row)) == 6 for row in table.tolist())


def test_without_quantization_every_linear_is_bf16(tmp_path: Path) -> None:
    plain = _load(tiny_checkpoint.write(tmp_path, experts=8, quantized=False, **SMALL))
    assert not [name for name in plain if name.endswith(".scale")]
    assert plain["layers.0.ffn.experts.7.w1.weight"].dtype == torch.bfloat16
