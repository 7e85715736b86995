"""The validator's checks of what a server takes and refuses: statuses and prompt lengths only."""

from __future__ import annotations

from collections.abc import Callable

from vision_exp.validate import images as pictures
from vision_exp.validate.checks import Lab
from vision_exp.validate.client import Refused
from vision_exp.validate.judge import Verdict, verdict


def system_image(lab: Lab) -> Verdict:
    """Pictures belong to user messages; elsewhere they are an error, not a silent drop."""
    system = {"role": "system", "content": [pictures.part(pictures.disc("red", 120))]}
    try:
        lab.ask([pictures.words("Hello")], before=[system])
        status = 200
    except Refused as error:
        status = error.status
    compared = "the status of a picture in a system message against 400"
    return verdict(status == 400, compared, f"HTTP {status}")


def shapes(lab: Lab) -> Verdict:
    """Every shape is taken, and costs the tokens that the released transform gives it."""
    expected = expected_tokens()
    compared = "status of pictures of many shapes against 200" + (
        ", their tokens against the released transform's, leading pads apart" if expected else ""
    )
    question = pictures.words("What is it?")
    base = lab.ask([question], max_tokens=1).prompt_tokens
    wrong, seen = [], []
    for width, height in pictures.SHAPES:
        part = pictures.part(pictures.any_shape(width, height))
        try:
            added = lab.ask([part, question], max_tokens=1).prompt_tokens - base
        except Refused as error:
            wrong.append(f"{width}x{height}: {error}")
            continue
        seen.append(f"{width}x{height} {added}")
        # Pads (0 to 3) and the separator between picture and text come on top of the block.
        if expected and not 0 <= added - expected(width, height) <= 5:
            wrong.append(f"{width}x{height}: {added} tokens, block {expected(width, height)}")
    return verdict(not wrong, compared, "; ".join(wrong or seen))


def expected_tokens() -> Callable[[int, int], int] | None:
    """Block length without leading pads, by the overlay's own code; None where torch is missing."""
    try:
        from types import SimpleNamespace

        from vision_exp.config import VisionConfig
        from vision_exp.image.transform import llm_grid_of, vit_grid_for
        from vision_exp.layout import core_length
    except ImportError:
        return None
    released = SimpleNamespace(
        model_type="deepseek_v4",
        hidden_size=4096,
        vision_n_layers=32,
        vision_dim=1024,
        vision_n_heads=16,
        vision_inter_dim=2816,
        vision_patch_size=14,
        vision_rope_theta=10000.0,
        vision_downsample_ratio=3,
        vision_max_n_token=384,
        vision_min_pixels=147456,
        vision_max_wh_ratio=8,
    )
    config = VisionConfig.from_hf_config(released)

    def tokens(width: int, height: int) -> int:
        return core_length(llm_grid_of(vit_grid_for(width, height, config), config))

    return tokens


def formats(lab: Lab) -> Verdict:
    wrong = []
    for name, (picture, form) in pictures.kinds().items():
        try:
            lab.ask([pictures.part(picture, form), pictures.words("What is it?")], max_tokens=1)
        except Refused as error:
            wrong.append(f"{name}: {error}")
    compared = "status of pictures of many formats and colour modes against 200"
    return verdict(not wrong, compared, "; ".join(wrong) or f"{len(pictures.kinds())} taken")
