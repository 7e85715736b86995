"""The vision tower against native vLLM's on a CPU, as a ratio measured in one run.

    python bench/tower.py [--layers N] [--rounds N] [--threads N] [--write-results]

Both hold the same weights of the real sizes in bfloat16 and encode one image of 42x74 patches;
the outputs are compared first. Wanted: at least 0.95 of native's throughput. Needs about 4 GB and
an environment that has vLLM.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests"), str(REPO / "tests" / "support")]

import native_image  # noqa: E402 (the path is set above)
import native_tower  # noqa: E402
import reporting  # noqa: E402
import sources  # noqa: E402
import tiny_config  # noqa: E402
import torch  # noqa: E402
import vllm  # noqa: E402

from vision_exp.config import VisionConfig  # noqa: E402
from vision_exp.tower import VisionTower  # noqa: E402

GRID = (42, 74)
WANTED = {"tower": 0.95}
SIZES = {
    "vision_dim": 1024,
    "vision_n_heads": 16,
    "vision_inter_dim": 2816,
    "hidden_size": 4096,
}


def measure(layers: int, rounds: int) -> dict[str, dict[str, float]]:
    native = native_tower.load(sources.stock(native_image.RELEASE) / native_tower.PATH)
    hf = SimpleNamespace(**tiny_config.vision_config(**SIZES, vision_n_layers=layers))
    with torch.device("meta"):
        mine = VisionTower(VisionConfig.from_hf_config(hf))
        theirs = native.DeepseekV4ViT(hf)
    mine.to_empty(device="cpu")
    torch.manual_seed(0)
    for name, parameter in mine.named_parameters():
        std = 0.02 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
        parameter.data.normal_(1.0 if "norm" in name else 0.0, std)
        parameter.data = parameter.data.bfloat16()
    theirs.load_state_dict(mine.state_dict(), assign=True)
    native_tower.on_cpu(theirs)
    patches = (torch.rand(GRID[0] * GRID[1], 3, 14, 14) * 2 - 1).bfloat16()
    expected, got = theirs(patches, *GRID).double(), mine(patches, GRID).double()
    error = float((got - expected).norm() / expected.norm())
    print(f"relative difference of the outputs {error:.1e}")
    if error > 1e-2:
        raise SystemExit("the sides do not compute the same")
    return {
        "tower": reporting.compare(
            lambda: theirs(patches, *GRID), lambda: mine(patches, GRID), rounds
        )
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--write-results", action="store_true", help="keep them in bench/results/")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with native_tower.one_rank(), torch.inference_mode():
        figures = measure(options.layers, options.rounds)
    versions = {
        "native": native_image.RELEASE,
        "layers from vllm": vllm.__version__,
        "torch": torch.__version__,
        "layers": str(options.layers),
        "threads": str(options.threads),
        "rounds": str(options.rounds),
    }
    return reporting.report("tower", versions, figures, WANTED, keep=options.write_results)


if __name__ == "__main__":
    raise SystemExit(main())
