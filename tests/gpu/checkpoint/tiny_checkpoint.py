"""Writes a small, valid Vision-Exp checkpoint: real names, widths and dtypes, few layers, experts.

    python tiny_checkpoint.py FOLDER [--seed N] [--text-only] [--vision-layers N] [--sees]

Random weights, the same for the same seed on any machine. A text-only checkpoint of the same seed
has the same language model: its tensors are the vision checkpoint's without what vision adds.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import released_config as released
import tiny_tokenizer
from gpu.checkpoint.tensors import Spec, specs, tensor

VISION_EXTRA = ("vision.", "aligner.", "image_")


def config_json(
    *,
    layers: int = 5,
    experts: int = 32,
    draft_layers: int = 3,
    vision_layers: int = 2,
    quantized: bool = True,
    **overrides: object,
) -> dict:
    """The config.json: the released values, but for the counts given here and ``overrides``."""
    config: dict = {
        **released.LANGUAGE,
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "compress_ratios": released.compress_ratios(layers),
        "rms_norm_eps": released.TEXT_EPS,
        "num_nextn_predict_layers": draft_layers,
    }
    if quantized:
        config |= released.QUANTIZED
    if draft_layers:
        last = list(range(max(layers - 3, 0), layers))
        config |= {**released.DRAFT, "dspark_target_layer_ids": last}
    if vision_layers:
        config |= released.VISION
        config |= {"vision_n_layers": vision_layers, "rms_norm_eps": released.VISION_EPS}
    return config | overrides


def write(
    folder: Path,
    *,
    seed: int = 0,
    vision_layers: int = 2,
    layers: int = 5,
    experts: int = 32,
    draft_layers: int = 3,
    quantized: bool = True,
    **overrides: object,
) -> Path:
    """Writes config.json, the shards with their index, and the tokenizer; returns ``folder``.

    ``vision_layers=0`` writes a text-only checkpoint. ``overrides`` replace config keys (smaller
    widths for the CPU: keep widths multiples of 128 when ``quantized``). An earlier checkpoint in
    ``folder`` is removed first. Raises ValueError for counts that no valid checkpoint has.
    """
    folder = Path(folder)
    config = config_json(
        layers=layers,
        experts=experts,
        draft_layers=draft_layers,
        vision_layers=vision_layers,
        quantized=quantized,
        **overrides,
    )
    _check(config)
    folder.mkdir(parents=True, exist_ok=True)
    # The config first: what is cut off from here on is no checkpoint.
    for old in (
        "config.json",
        "sees.json",
        "model.safetensors.index.json",
        *folder.glob("*.safetensors"),
    ):
        (folder / old).unlink(missing_ok=True)
    tiny_tokenizer.write(folder)
    shards = _shards(config)
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda item: _save(folder, item, seed, config), shards.items()))
    weight_map = {spec.name: name for name, members in shards.items() for spec in members}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    _json(folder / "model.safetensors.index.json", index)
    _json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    _json(folder / "config.json", config)
    return folder


def _check(config: dict) -> None:
    experts, chosen = config["n_routed_experts"], config["num_experts_per_tok"]
    if experts < chosen:
        raise ValueError(f"{experts} experts, of which a token chooses {chosen}")
    if config.get("vision_n_layers", 1) < 1:
        raise ValueError(f"{config['vision_n_layers']} layers of vision")


def _shards(config: dict) -> dict[str, list[Spec]]:
    """One file per layer, one for the vision part, one for the rest."""
    groups: dict[str, list[Spec]] = {}
    for spec in specs(config):
        parts = spec.name.split(".")
        key = ".".join(parts[:2]) if parts[0] in ("layers", "mtp") else "top"
        groups.setdefault("vision" if spec.name.startswith(VISION_EXTRA) else key, []).append(spec)
    width = len(groups)
    return {
        f"model-{i:05}-of-{width:05}.safetensors": members
        for i, members in enumerate(groups.values(), start=1)
    }


def _save(folder: Path, item: tuple[str, list[Spec]], seed: int, config: dict) -> int:
    name, members = item
    tensors = {spec.name: tensor(spec, seed, config) for spec in members}
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return sum(value.nbytes for value in tensors.values())


def _json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _fit(folder: Path, seed: int, device: str) -> None:
    # Needs transformers, which plain writing does not.
    from gpu.checkpoint import sees

    for name, found in sees.fit(folder, sees.Plan(seed=seed), device).items():
        print(f"{name}: {found.words()}, held out")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text-only", action="store_true")
    parser.add_argument("--vision-layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--sees", action="store_true", help="fit it, so that answers tell images")
    parser.add_argument("--device", default="cuda", help="where --sees fits")
    args = parser.parse_args()
    layers = 0 if args.text_only else args.vision_layers
    try:
        write(args.folder, seed=args.seed, vision_layers=layers, experts=args.experts)
        if args.sees:
            _fit(args.folder, args.seed, args.device)
    except (ValueError, OSError, MemoryError, SafetensorError) as error:
        print(f"no checkpoint was written to {args.folder}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
