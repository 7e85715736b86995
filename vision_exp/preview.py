"""What the model will see of an image: `python3 hotfix.py preview IMAGE [-o OUT.png]`.

Prints sizes and token cost, and draws the transformed image with its patch grid (thin lines) and
token grid (thick lines). Needs Pillow and torch, not vLLM; `--help` needs neither.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from vision_exp.config import VisionConfig

if TYPE_CHECKING:
    from PIL import Image

    from vision_exp.image.transform import ImagePatches

#: The released checkpoint's values, this package's only copy; `--config` reads another's.
RELEASED = VisionConfig(
    n_layers=32,
    dim=1024,
    n_heads=16,
    inter_dim=2816,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_n_token=384,
    min_pixels=147456,
    max_wh_ratio=8,
    hidden_size=4096,
)

PROGRAM = "python3 hotfix.py preview"
_ZOOM = 2
_PATCH_LINE = (255, 255, 255, 70)
_TOKEN_LINE = (255, 64, 0, 220)


def unpadded_length(width: int, height: int) -> int:
    """Tokens of an image of this size without leading pads, on the released checkpoint."""
    from vision_exp.image.transform import llm_grid_of, vit_grid_for
    from vision_exp.layout import GROUP, block_length

    return block_length(llm_grid_of(vit_grid_for(width, height, RELEASED), RELEASED), GROUP - 1)


def pixels_of(seen: ImagePatches) -> Image.Image:
    """The RGB image that the patches hold: 8 bits a channel, as bfloat16 keeps them."""
    import torch
    from PIL import Image

    height, width = seen.vit_grid
    patch = seen.patches.shape[-1]
    rows = seen.patches.float().view(height, width, 3, patch, patch).permute(0, 3, 1, 4, 2)
    values = ((rows * 0.5 + 0.5) * 255).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(values.reshape(height * patch, width * patch, 3).numpy())


def draw(seen: ImagePatches, config: VisionConfig) -> Image.Image:
    """The image, twice as large, with lines between patches and between tokens.

    The token grid reaches past the image where the patch grid is no multiple of three: the
    aligner fills those cells with zeros, shown black.
    """
    from PIL import Image, ImageDraw

    image = pixels_of(seen)
    step = config.patch_size * _ZOOM
    cell = step * config.downsample_ratio
    size = (seen.llm_grid[1] * cell, seen.llm_grid[0] * cell)
    canvas = Image.new("RGB", size)
    canvas.paste(
        image.resize((image.width * _ZOOM, image.height * _ZOOM), Image.Resampling.NEAREST)
    )
    lines = ImageDraw.Draw(canvas, "RGBA")
    for spacing, colour, width in ((step, _PATCH_LINE, 1), (cell, _TOKEN_LINE, 2)):
        for x in range(0, size[0] + 1, spacing):
            lines.line([(x, 0), (x, size[1])], fill=colour, width=width)
        for y in range(0, size[1] + 1, spacing):
            lines.line([(0, y), (size[0], y)], fill=colour, width=width)
    return canvas


def report(image: Image.Image, seen: ImagePatches, config: VisionConfig) -> str:
    """Sizes, grids and the token cost at each start position modulo 4, one fact a line."""
    from vision_exp.layout import GROUP, block_length, build_block, leading_pads

    (vit_h, vit_w), (llm_h, llm_w) = seen.vit_grid, seen.llm_grid
    patch = config.patch_size
    kinds = build_block(seen.llm_grid, GROUP - 1).types.tolist()
    lines = [
        f"image     {image.width}x{image.height} {image.mode}",
        f"seen as   {vit_w * patch}x{vit_h * patch} pixels",
        f"patches   {vit_w}x{vit_h} of {patch}x{patch} pixels",
        f"tokens    {llm_w}x{llm_h} image rows from the tower, {kinds.count(2)} in all",
        f"block     {len(kinds)} tokens from START to END: {kinds.count(2)} image, "
        f"{kinds.count(3)} newline, {kinds.count(1)} pad, start and end",
        "cost      by the prompt position where it begins, modulo 4:",
    ]
    lines += [
        f"          {start}: {leading_pads(start)} leading pads, "
        f"{block_length(seen.llm_grid, start)} tokens (limit {config.max_n_token})"
        for start in range(GROUP)
    ]
    return "\n".join(lines)


class Refused(Exception):
    """What was given cannot be used: exit code, what happened, and what to give instead."""

    def __init__(self, code: int, fault: str, instead: str) -> None:
        super().__init__(fault)
        self.code, self.instead = code, instead


def read_config(path: Path) -> VisionConfig:
    """The vision fields of a checkpoint's config.json. Raises Refused."""
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
        return VisionConfig.from_hf_config(SimpleNamespace(**keys))
    except (OSError, ValueError, TypeError) as error:
        fault = f"--config {path} is no config.json of a vision checkpoint: {error}"
        raise Refused(2, fault, "IMAGE   (without --config: as the released one)") from error


def read_image(path: Path, config: VisionConfig) -> tuple[Image.Image, ImagePatches]:
    """The image, and what the tower gets of it. Raises Refused."""
    from vision_exp.image.transform import Image, image_to_patches  # Pillow's, after torch

    try:
        with warnings.catch_warnings():
            # Pillow's warning at half of its limit; what is over the limit is an error.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(path)
            return image, image_to_patches(image, config)
    except (OSError, ValueError, TypeError, Image.DecompressionBombError) as error:
        reason = "not an image" if isinstance(error, Image.UnidentifiedImageError) else error
        fault = f"{path} cannot be shown: {reason}"
        raise Refused(1, fault, "IMAGE   (a file that Pillow opens: PNG, JPEG, WebP)") from error


def format_of(path: Path, image: Path) -> str:
    """The format that the drawing's name says, PNG without an ending. Raises Refused."""
    from PIL import Image

    form = Image.registered_extensions().get(path.suffix.lower() or ".png", "")
    hint = f"{shlex.quote(str(image))} -o seen.png"
    try:
        faults = {
            "is a folder": path.is_dir(),
            f"is in a folder that does not exist, {path.parent}": not path.parent.is_dir(),
            "is the image itself": path.exists() and image.exists() and path.samefile(image),
            f"ends in {path.suffix}, which is no image format": form not in Image.SAVE,
        }
    except OSError as error:  # as of a name that is too long
        raise Refused(2, f"-o {path} cannot be written: {error.strerror}", hint) from error
    for fault in (each for each, holds in faults.items() if holds):
        raise Refused(2, f"-o {path} {fault}", hint)
    return form


def write_drawing(path: Path, drawn: Image.Image, form: str) -> None:
    """Writes what could be encoded as a whole. Raises Refused."""
    data = io.BytesIO()
    try:
        drawn.save(data, format=form)
        path.write_bytes(data.getvalue())
    except (OSError, ValueError) as error:
        fault = f"-o {path} cannot be written: {error}"
        raise Refused(2, fault, "IMAGE -o FILE.png   (elsewhere)") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 when the image cannot be used, 2 on bad usage."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("image", type=Path, metavar="IMAGE")
    parser.add_argument("-o", "--output", type=Path, help="image to write, as its ending says")
    parser.add_argument("--config", type=Path, help="config.json of a checkpoint")
    args = parser.parse_args(argv)
    try:
        config = RELEASED if args.config is None else read_config(args.config)
        form = "" if args.output is None else format_of(args.output, args.image)
        image, seen = read_image(args.image, config)
        print(report(image, seen, config))
        if args.output is not None:
            write_drawing(args.output, draw(seen, config), form)
            print(f"drawn     {args.output}: thin lines patches, thick lines tokens")
    except Refused as error:
        print(f"[vision-exp] {error}. Nothing was written.", file=sys.stderr)
        print(f"next: {PROGRAM} {error.instead}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
