"""The processor, built through vLLM's registry: ids, placeholders, embeds, hashes, errors."""

from __future__ import annotations

import io
import random
from typing import Any

import torch
from checks import check, equal, raises
from PIL import Image
from rig_model import PLACEHOLDER, Rig, noise

SIZES = ((640, 480), (33, 700), (1920, 200), (1, 1), (1400, 1400))
START, PAD, IMAGE, NEWLINE, END = range(129257, 129262)
TEXT = "<｜deepseek_image｜>"


def expected_ids(prompt: list[int], images: list[Any], config: Any) -> tuple[list[int], list]:
    """The prompt as the layout says it: one block per placeholder, at its own start."""
    from vision_exp.image.transform import image_to_patches
    from vision_exp.layout import build_block

    out: list[int] = []
    blocks = []
    left = list(images)
    for token in prompt:
        if token != PLACEHOLDER:
            out.append(token)
            continue
        block = build_block(image_to_patches(left.pop(0), config).llm_grid, len(out))
        ids = [START + kind for kind in block.types.tolist()]
        blocks.append((len(out), ids))
        out += ids
    return out, blocks


def compare(made: Any, prompt: list[int], images: list[Any], config: Any) -> None:
    ids, blocks = expected_ids(prompt, images, config)
    equal(made["prompt_token_ids"], ids, "ids")
    ranges = made["mm_placeholders"]["image"]
    equal([(one.offset, one.length) for one in ranges], [(at, len(b)) for at, b in blocks])
    for one, (start, block) in zip(ranges, blocks, strict=True):
        equal(one.is_embed.tolist(), [token == IMAGE for token in block], "embed mask")
        equal((start + block.index(START)) % 4, 3, "START modulo 4")
        equal(one.get_num_embeds(), block.count(IMAGE), "number of embeds")


@check
def ids_at_every_offset(rig: Rig) -> None:
    """1, 2 and 5 images of different sizes, at every start offset, caches off and on."""
    pictures = [noise(*size, seed=i) for i, size in enumerate(SIZES)]
    plain, cached = rig.processor(), rig.processor(cached=True)
    config = plain.info.vision
    for count in (1, 2, 5):
        images = pictures[:count]
        for offset in range(4):
            prompt = [9] * offset
            for index in range(count):
                prompt += [PLACEHOLDER] + [11] * index
            for processor in (plain, cached, cached):
                compare(rig.apply(processor, prompt, images), prompt, images, config)


@check
def one_picture_has_one_hash_at_all_offsets(rig: Rig) -> None:
    processor = rig.processor(cached=True)
    picture = noise(300, 500)
    made = [rig.apply(processor, [7] * n + [PLACEHOLDER], [picture]) for n in range(4)]
    equal(len({one["mm_hashes"]["image"][0] for one in made}), 1, "hashes")
    lengths = {one["mm_placeholders"]["image"][0].length for one in made}
    equal(len(lengths), 4, "lengths by offset")
    equal(len({one["mm_placeholders"]["image"][0].get_num_embeds() for one in made}), 1, "embeds")


@check
def tensors_of_each_image(rig: Rig) -> None:
    from vision_exp.image import backend
    from vision_exp.image.transform import image_to_patches
    from vision_exp.layout import build_block

    pictures = [noise(*size, seed=i) for i, size in enumerate(SIZES)]
    for processor in (rig.processor(), rig.processor(cached=True)):
        made = rig.apply(processor, [PLACEHOLDER] * len(pictures), pictures)
        for picture, item in zip(pictures, made["mm_kwargs"]["image"], strict=True):
            data = item.get_data()
            alone = image_to_patches(picture, processor.info.vision)
            equal(torch.equal(data["patches"], alone.patches), True, "patches")
            equal(
                backend.current_backend().resamples,
                True,
                "compiled by the time a processor is there",
            )
            equal(data["patches"].dtype, torch.bfloat16)
            equal(tuple(data["vit_grid"].tolist()), alone.vit_grid)
            equal(tuple(data["llm_grid"].tolist()), alone.llm_grid)
            order = build_block(alone.llm_grid, 3).perm
            equal(torch.equal(data["perm"], order), True, "row order")


@check
def batches_of_requests_reach_the_model_as_it_reads_them(rig: Rig) -> None:
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    processor = rig.processor()
    pictures = [noise(*size, seed=i) for i, size in enumerate(SIZES)]
    items = []
    for picture in pictures:
        made = rig.apply(processor, [PLACEHOLDER], [picture])
        items += [("image", item) for item in made["mm_kwargs"]["image"]]
    for some in (items, items[:1], items[:1] * 2):
        ((_, count, batch),) = group_and_batch_mm_kwargs(some)
        equal(count, len(some))
        equal(sorted(batch), ["llm_grid", "patches", "perm", "vit_grid"])
        equal(tuple(batch["vit_grid"].shape), (count, 2))
        equal(len(batch["patches"]), int(batch["vit_grid"].prod(-1).sum()))
        equal(len(batch["perm"]), int(batch["llm_grid"].prod(-1).sum()))


@check
def text_path_gives_the_same_ids(rig: Rig) -> None:
    processor = rig.processor()
    tokenizer = processor.info.get_tokenizer()
    pictures = [noise(640, 480), noise(33, 700)]
    text = f"describe {TEXT}\n\nand the {TEXT} image"
    prompt = tokenizer.encode(text)
    equal(prompt.count(PLACEHOLDER), 2)
    made = processor(text, processor.info.parse_mm_data({"image": pictures}))
    compare(made, prompt, pictures, processor.info.vision)


@check
def offline_path_gives_the_same_ids(rig: Rig) -> None:
    """Through the renderer that LLM.generate uses, as text and as ids."""
    from vllm.config import VllmConfig
    from vllm.renderers.registry import renderer_from_config

    renderer = renderer_from_config(VllmConfig(model_config=rig.vision_model_config))
    config = rig.processor().info.vision
    pictures = [noise(640, 480), noise(33, 700)]
    text = f"what {TEXT} is {TEXT}"
    prompt = renderer.get_tokenizer().encode(text)
    for form in ({"prompt": text}, {"prompt_token_ids": prompt}):
        (made,) = renderer.render_cmpl([{**form, "multi_modal_data": {"image": pictures}}])
        compare(made, prompt, pictures, config)


@check
def twenty_images_share_nothing(rig: Rig) -> None:
    processor = rig.processor(cached=True)
    pictures = [noise(448, 448, seed=i) for i in range(20)]
    order = [i for i in range(20) for _ in range(2)]
    random.Random(0).shuffle(order)
    seen: dict[int, set[str]] = {}
    patches: dict[int, torch.Tensor] = {}
    for index in order:
        made = rig.apply(processor, [5, PLACEHOLDER], [pictures[index]])
        seen.setdefault(index, set()).add(made["mm_hashes"]["image"][0])
        data = made["mm_kwargs"]["image"][0].get_data()["patches"]
        equal(torch.equal(patches.setdefault(index, data), data), True, "same image")
    equal([len(hashes) for hashes in seen.values()], [1] * 20, "one hash for one image")
    equal(len(set().union(*seen.values())), 20, "hashes")
    equal(len({data.float().sum().item() for data in patches.values()}), 20, "contents")


@check
def hashes_cover_size_mode_and_background(rig: Rig) -> None:
    from vllm.multimodal.media import MediaWithBytes

    processor = rig.processor()

    def key(image: Any) -> str:
        return rig.hash_of(processor, image)

    pixels = random.Random(1).randbytes(3 * 30 * 150)
    wide = Image.frombytes("RGB", (150, 30), pixels)
    high = Image.frombytes("RGB", (30, 150), pixels)
    equal(key(wide) == key(high), False, "equal bytes, other shape")
    one_off = wide.copy()
    one_off.putpixel((0, 0), tuple(255 - value for value in wide.getpixel((0, 0))))
    equal(key(wide) == key(one_off), False, "one pixel")
    equal(key(wide), key(wide.copy()), "the same picture")
    grey = wide.convert("L")
    equal(key(grey) == key(wide), False, "mode")

    # One PNG with a transparent part, loaded on two backgrounds: same bytes, other pictures.
    png = io.BytesIO()
    Image.new("RGBA", (40, 40), (255, 0, 0, 0)).save(png, "PNG")
    white, black = (
        MediaWithBytes(Image.new("RGB", (40, 40), colour), png.getvalue())
        for colour in ("white", "black")
    )
    equal(key(white) == key(black), False, "background")
    equal(key(white), key(Image.new("RGB", (40, 40), "white")), "loaded and given")

    # A palette's transparent colour is in no pixel, but decides what is seen.
    plain, clear = (Image.new("P", (40, 40)) for _ in range(2))
    for one in (plain, clear):
        one.putpalette([200, 0, 0] * 256)
    clear.info["transparency"] = 0
    equal(key(MediaWithBytes(plain, b"")) == key(MediaWithBytes(clear, b"")), False, "palette")


@check
def hashes_cover_the_vision_config(rig: Rig) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    picture = noise(300, 300)
    other = rig.model_config(rig.vision_folder, hf_overrides={"vision_max_n_token": 200})
    keys = {
        rig.hash_of(processor, picture)
        for processor in (rig.processor(), MULTIMODAL_REGISTRY.create_processor(other))
    }
    equal(len(keys), 2)


def status(error: BaseException) -> int:
    """The HTTP status that this release's server answers with."""
    try:
        from vllm.entrypoints.serve.utils.error_response import create_error_response
    except ImportError:
        from vllm.entrypoints.serve.exception_handling.error_response import (
            create_error_response,
        )
    return create_error_response(error).error.code


@check
def refusals_are_client_errors(rig: Rig) -> None:
    processor = rig.processor()
    picture = noise(50, 50)
    cases = (
        ("too few placeholders", [5, PLACEHOLDER], [picture] * 2, "1 image placeholders"),
        ("no placeholder", [5, 6], [picture], "0 image placeholders"),
        ("too many placeholders", [PLACEHOLDER] * 3, [picture] * 2, "3 image placeholders"),
        ("reserved id", [IMAGE, PLACEHOLDER], [picture], "reserved"),
        ("no picture", [PLACEHOLDER], [torch.zeros(3, 4, 5)], "image 0"),
        ("a word", [PLACEHOLDER], ["abc"], "image 0"),
        ("bfloat16", [PLACEHOLDER], [torch.zeros(3, 4, 5, dtype=torch.bfloat16)], "image 0"),
        ("above the limit", [PLACEHOLDER] * 33, [picture] * 33, "--limit-mm-per-prompt"),
    )
    for what, prompt, images, text in cases:
        try:
            rig.apply(processor, prompt, images)
        except Exception as error:  # noqa: BLE001  any type: the status is what counts
            equal(status(error), 400, f"{what}: {error!r}")
            equal(text in str(error), True, f"{what}: {error}")
        else:
            raise AssertionError(f"{what}: accepted")


@check
def the_failing_image_is_named_by_its_place_in_the_request(rig: Rig) -> None:
    processor = rig.processor(cached=True)
    good, bad = noise(50, 50), Image.new("RGB", (3, 0))
    rig.apply(processor, [PLACEHOLDER], [good])
    with raises(Exception, "image 2"):
        rig.apply(processor, [PLACEHOLDER] * 3, [good, good, bad])


@check
def embeddings_are_refused(rig: Rig) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    config = rig.model_config(rig.vision_folder, enable_mm_embeds=True)
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    with raises(Exception, "embeddings are not supported"):
        rig.apply(processor, [PLACEHOLDER], [torch.zeros(4, config.hf_config.hidden_size)])


@check
def videos_are_refused(rig: Rig) -> None:
    import numpy as np

    processor = rig.processor()
    try:
        processor.info.parse_mm_data({"video": [np.zeros((2, 8, 8, 3), np.uint8)]})
    except Exception as error:  # noqa: BLE001  any type: the status is what counts
        equal(status(error), 400, repr(error))
        equal("takes images, not video" in str(error), True, str(error))
    else:
        raise AssertionError("accepted")


@check
def cached_images_may_come_by_uuid_alone(rig: Rig) -> None:
    processor = rig.processor(cached=True)
    picture = noise(200, 100)
    first = rig.apply(processor, [PLACEHOLDER], [picture], uuids={"image": ["cat"]})
    again = rig.apply(processor, [8, PLACEHOLDER], [None], uuids={"image": ["cat"]})
    equal(again["mm_hashes"]["image"], first["mm_hashes"]["image"])
    compare(again, [8, PLACEHOLDER], [picture], processor.info.vision)


@check
def the_dummy_image_has_the_most_patches(rig: Rig) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from vision_exp.image.transform import vit_grid_for

    processor = rig.processor()
    config = rig.vision_model_config
    made = MULTIMODAL_REGISTRY.get_dummy_mm_inputs(config, {"image": 2}, processor=processor)
    grids = [item.get_data()["vit_grid"].prod().item() for item in made["mm_kwargs"]["image"]]
    draw = random.Random(2)
    most = 0
    for _ in range(3000):
        width, height = (int(2 ** draw.uniform(0, 13)) for _ in range(2))
        rows, columns = vit_grid_for(width, height, processor.info.vision)
        most = max(most, rows * columns)
    equal(grids[0] >= most, True, f"{grids[0]} patches, random images reach {most}")
    square = vit_grid_for(4000, 4000, processor.info.vision)
    equal(grids[0] > square[0] * square[1], True, "more than a square")
    limit = processor.info.get_mm_max_tokens_per_item(4096, {"image": 1})["image"]
    for one in made["mm_placeholders"]["image"]:
        equal(one.length <= limit, True, f"{one.length} tokens, limit {limit}")


@check
def works_without_a_tokenizer(rig: Rig) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    config = rig.model_config(rig.vision_folder, skip_tokenizer_init=True)
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    made = MULTIMODAL_REGISTRY.get_dummy_mm_inputs(config, {"image": 1}, processor=processor)
    equal(len(made["mm_placeholders"]["image"]), 1)
    picture = noise(60, 60)
    compare(
        rig.apply(processor, [4, PLACEHOLDER], [picture]),
        [4, PLACEHOLDER],
        [picture],
        processor.info.vision,
    )


@check
def another_tokenizer_stops_the_start(rig: Rig) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from vision_exp.config import VisionConfigError

    folder = rig.checkpoint("other-tokenizer")
    path = folder / "tokenizer.json"
    swapped = path.read_text().replace("mm_span_0432", "mm_span_0999")
    path.write_text(swapped)
    config = None
    with raises(VisionConfigError, "mm_span_0432"):
        config = rig.model_config(folder)
        MULTIMODAL_REGISTRY.supports_multimodal_inputs(config)
