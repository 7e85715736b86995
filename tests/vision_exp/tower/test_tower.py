"""The tower and the aligner on plain torch, against independent arithmetic in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import stages
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vision_exp.config import VisionConfig
from vision_exp.tower import Aligner, VisionTower
from vision_exp.tower.linears import PLAIN, Linears
from vision_exp.tower.tower import MLP, RotaryEmbedding

SMALL = VisionConfig(
    n_layers=2,
    dim=128,
    n_heads=2,
    inter_dim=96,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_n_token=384,
    min_pixels=147456,
    max_wh_ratio=8,
    hidden_size=80,
)
MIXED = [(3, 5), (3, 5), (7, 2), (3, 5), (2, 7)]


def randomise(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(
            1 + noise / 4 if "norm" in name else noise * parameter.shape[-1] ** -0.5
        )
    return module.requires_grad_(False)


@pytest.fixture(scope="module")
def tower() -> VisionTower:
    return randomise(VisionTower(SMALL))


@pytest.fixture(scope="module")
def aligner() -> Aligner:
    return randomise(Aligner(SMALL), seed=1)


def images(*grids: tuple[int, int], seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = sum(height * width for height, width in grids)
    return torch.rand(count, 3, 14, 14, generator=generator) * 2 - 1


def test_parameter_names_and_shapes_are_the_checkpoints():
    real = VisionConfig(32, 1024, 16, 2816, 14, 10000.0, 3, 384, 147456, 8, 4096)
    with torch.device("meta"):
        modules = {"vision": VisionTower(real), "aligner": Aligner(real)}
    found = {
        f"{part}.{name}": tuple(tensor.shape)
        for part, module in modules.items()
        for name, tensor in module.state_dict().items()
    }
    expected = {
        "vision.patch_embed.proj.weight": (1024, 588),
        "vision.patch_embed.proj.bias": (1024,),
        "vision.norm.weight": (1024,),
        "aligner.w1.weight": (4096, 9216),
        "aligner.w1.bias": (4096,),
        "aligner.w2.weight": (4096, 4096),
        "aligner.w2.bias": (4096,),
    }
    for layer in range(32):
        block = f"vision.blocks.{layer}"
        expected |= {
            f"{block}.norm1.weight": (1024,),
            f"{block}.norm2.weight": (1024,),
            f"{block}.attn.wqkv.weight": (3072, 1024),
            f"{block}.attn.wqkv.bias": (3072,),
            f"{block}.attn.wo.weight": (1024, 1024),
            f"{block}.attn.wo.bias": (1024,),
            f"{block}.mlp.w1.weight": (5632, 1024),
            f"{block}.mlp.w2.weight": (1024, 2816),
        }
    assert found == expected
    assert len(found) == 263


def reference_block(weights: dict[str, torch.Tensor], x: torch.Tensor, grid) -> torch.Tensor:
    """One block in float64, head by head, rotary embedding as complex numbers."""

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    height, width = grid
    angles = []
    for row in range(height):
        for column in range(width):
            steps = [10000.0 ** (-2 * k / 32) for k in range(16)]
            angles.append([row * s for s in steps] + [column * s for s in steps])
    wide = torch.tensor(angles, dtype=torch.float64)
    rope = torch.polar(torch.ones_like(wide), wide)

    def rotated(x):
        pairs = torch.complex(x[:, :32], x[:, 32:]) * rope
        return torch.cat([pairs.real, pairs.imag], -1)

    heads = []
    inner = norm(x, weights["norm1.weight"])
    for head in range(2):
        q, k, v = (
            inner @ weights["attn.wqkv.weight"][start : start + 64].T
            + weights["attn.wqkv.bias"][start : start + 64]
            for start in (64 * head, 128 + 64 * head, 256 + 64 * head)
        )
        scores = rotated(q) @ rotated(k).T / math.sqrt(64)
        heads.append(scores.softmax(-1) @ v)
    x = x + torch.cat(heads, -1) @ weights["attn.wo.weight"].T + weights["attn.wo.bias"]
    inner = norm(x, weights["norm2.weight"]) @ weights["mlp.w1.weight"].T
    gate, up = inner[:, :96], inner[:, 96:]
    return x + (gate * gate.sigmoid() * up) @ weights["mlp.w2.weight"].T


@pytest.mark.parametrize("grid", [(1, 1), (5, 7), (12, 3)])
def test_each_block_against_float64(tower, grid):
    patches = images(grid)
    with stages.recorded(tower) as found:
        out = tower(patches, grid)
    assert list(found) == ["patch_embed", "blocks.0", "blocks.1", "norm"]
    assert out is found["norm"]
    x = patches.flatten(1).double() @ tower.patch_embed.proj.weight.double().T
    x = x + tower.patch_embed.proj.bias
    assert relative(found["patch_embed"], x) < 1e-6
    for index, block in enumerate(tower.blocks):
        weights = {name: value.double() for name, value in block.state_dict().items()}
        x = reference_block(weights, x, grid)
        assert relative(found[f"blocks.{index}"], x) < 1e-6


@pytest.mark.parametrize("grid", [(3, 3), (4, 5), (2, 7), (1, 1)])
def test_aligner_against_a_loop(aligner, grid):
    height, width = grid
    rows = torch.randn(height * width, 128, generator=torch.Generator().manual_seed(3))
    padded = torch.zeros(-(-height // 3) * 3, -(-width // 3) * 3, 128)
    padded[:height, :width] = rows.view(height, width, 128)
    cells = []
    for top in range(0, padded.shape[0], 3):
        for left in range(0, padded.shape[1], 3):
            square = padded[top : top + 3, left : left + 3]
            cells.append(torch.stack([square[:, :, channel].flatten() for channel in range(128)]))
    flat = torch.stack(cells).flatten(1).double()
    inner = flat @ aligner.w1.weight.double().T + aligner.w1.bias
    inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    expected = inner @ aligner.w2.weight.double().T + aligner.w2.bias
    given = []
    hook = aligner.w1.register_forward_pre_hook(lambda _module, inputs: given.extend(inputs))
    out = aligner(rows, grid)
    hook.remove()
    assert torch.equal(given[0], flat.float())
    assert relative(out, expected) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_one_by_one(tower, aligner, dtype):
    """Also in one batch where neighbours are equal, and where only the areas are."""
    tower, aligner = (randomise(type(m)(SMALL)).to(dtype) for m in (tower, aligner))
    patches = images(*MIXED).to(dtype)
    rows = tower(patches, MIXED)
    cells = aligner(rows, MIXED)
    alone = [
        tower(part, grid)
        for part, grid in zip(patches.split([h * w for h, w in MIXED]), MIXED, strict=True)
    ]
    # Matrix products of other heights may add up in another order: the last bit may differ.
    bound = 1e-6 if dtype == torch.float32 else 4e-3
    assert relative(rows, torch.cat(alone)) < bound
    pairs = zip(alone, MIXED, strict=True)
    assert relative(cells, torch.cat([aligner(part, grid) for part, grid in pairs])) < bound


def test_no_attention_between_images(tower):
    patches = images(*MIXED)
    before = tower(patches, MIXED)
    patches[15:30] = images((3, 5), seed=9)  # the second image
    after = tower(patches, MIXED)
    assert torch.equal(before[:15], after[:15])
    assert torch.equal(before[30:], after[30:])
    assert not torch.isclose(before[15:30], after[15:30]).all(-1).any()


def test_a_pass_depends_on_no_data(tower, aligner):
    """On the meta device any read of a value fails, so nothing can wait for a device."""
    with torch.device("meta"):
        tower, aligner = VisionTower(SMALL), Aligner(SMALL)
        patches = torch.empty(sum(h * w for h, w in MIXED), 3, 14, 14)
    out = aligner(tower(patches, MIXED), MIXED)
    assert out.shape == (2 + 2 + 3 + 2 + 3, 80)


def test_only_the_first_pass_makes_angles_on_the_host():
    made = {torch.ops.aten.arange, torch.ops.aten.cos, torch.ops.aten.lift_fresh}

    class Made(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen: set[str] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in made:
                self.seen.add(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    tower = randomise(VisionTower(SMALL))
    with Made() as first:
        tower(images((4, 5)), (4, 5))
    patches = images(*MIXED)
    with Made() as second:
        tower(patches, MIXED)  # other grids need nothing new
    assert {"aten.arange", "aten.cos"} <= first.seen
    assert second.seen == set()


def test_one_graph_without_breaks(tower, aligner):
    def both(patches):
        return aligner(tower(patches, MIXED), MIXED)

    patches = images(*MIXED)
    compiled = torch.compile(both, fullgraph=True, backend="eager")
    assert torch.equal(compiled(patches), both(patches))


def test_bfloat16_keeps_norms_and_angles_wide(tower):
    """Norm weights and angles stay float32 under a bfloat16 default, and close to float32."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        narrow = VisionTower(SMALL).requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for n, p in narrow.named_parameters() if "norm" in n} == {torch.float32}
    assert narrow.patch_embed.proj.weight.dtype == torch.bfloat16
    narrow.load_state_dict(tower.state_dict())
    for table in narrow.to(torch.bfloat16).rope([(3, 5)], torch.device("cpu")):
        assert table.dtype == torch.float32
        assert table.shape == (15, 32)
    patches = images((3, 5))
    out = narrow(patches, (3, 5))
    assert out.dtype == torch.bfloat16
    assert relative(out, tower(patches, (3, 5))) < 2e-2


def test_longest_sides_have_angles(tower):
    for grid in ((564, 1), (1, 564), (549, 2)):
        for table in tower.rope([grid], torch.device("cpu")):
            assert table.shape == (grid[0] * grid[1], 32)


@pytest.mark.parametrize("grid", [(4, 4), [(3, 5), (1, 1)], (3, 4)])
def test_rows_that_do_not_fit_the_grids_are_refused(tower, aligner, grid):
    with pytest.raises(ValueError, match="patches, got 15"):
        tower(images((3, 5)), grid)
    with pytest.raises(ValueError, match="patches, got 15"):
        aligner(torch.zeros(15, 128), grid)


def test_heads_must_divide_among_ranks():
    with pytest.raises(ValueError, match="2 heads cannot be shared by 3 ranks"):
        VisionTower(SMALL, Linears(tp_size=3))
    with pytest.raises(ValueError, match="8 heads cannot be shared by 3 ranks"):
        VisionTower(replace(SMALL, n_heads=8), Linears(tp_size=3))


def test_theta_is_the_configs():
    cos, sin = RotaryEmbedding(replace(SMALL, rope_theta=100.0)).axis_tables(torch.device("cpu"))
    angles = torch.tensor([100.0 ** (-2 * k / 32) for k in range(16)], dtype=torch.float64)
    assert torch.allclose(cos[7].double(), (7 * angles).cos(), atol=1e-6)
    assert torch.allclose(sin[7].double(), (7 * angles).sin(), atol=1e-6)


def test_the_activation_is_rounded_once():
    mlp = randomise(MLP(SMALL, PLAIN, "")).bfloat16()
    x = torch.randn(9, SMALL.dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    gate, up = mlp.w1(x).float().chunk(2, dim=-1)
    assert torch.equal(mlp(x), mlp.w2((torch.nn.functional.silu(gate) * up).bfloat16()))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    theirs = theirs.double()
    return float((ours.double() - theirs).norm() / theirs.norm())
