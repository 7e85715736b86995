"""The processor, built through vLLM's registry: ids, placeholders, embeds, tensors."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch
from checks import check, equal
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
    images = [noise(*size, seed=i) for i, size in enumerate(SIZES)]
    plain, cached = rig.processor(), rig.processor(cached=True)
    config = plain.info.vision
    for count in (1, 2, 5):
        some = images[:count]
        for offset in range(4):
            prompt = [9] * offset
            for index in range(count):
                prompt += [PLACEHOLDER] + [11] * index
            for processor in (plain, cached, cached):
                compare(rig.apply(processor, prompt, some), prompt, some, config)


@check
def one_image_has_one_hash_at_all_offsets(rig: Rig) -> None:
    processor = rig.processor(cached=True)
    image = noise(300, 500)
    made = [rig.apply(processor, [7] * n + [PLACEHOLDER], [image]) for n in range(4)]
    equal(len({one["mm_hashes"]["image"][0] for one in made}), 1, "hashes")
    lengths = {one["mm_placeholders"]["image"][0].length for one in made}
    equal(len(lengths), 4, "lengths by offset")
    equal(len({one["mm_placeholders"]["image"][0].get_num_embeds() for one in made}), 1, "embeds")


@check
def tensors_of_each_image(rig: Rig) -> None:
    from vision_exp.image import backend
    from vision_exp.image.transform import image_to_patches
    from vision_exp.layout import build_block

    images = [noise(*size, seed=i) for i, size in enumerate(SIZES)]
    plain = rig.processor()
    for processor in (plain, plain, rig.processor(cached=True)):
        made = rig.apply(processor, [PLACEHOLDER] * len(images), images)
        for image, item in zip(images, made["mm_kwargs"]["image"], strict=True):
            data = item.get_data()
            alone = image_to_patches(image, processor.info.vision)
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
            if processor.cache is None:
                data["perm"].zero_()  # what is done with one request's reaches no other
    kept = {name: item[name].field.keep_on_cpu for name in ("vit_grid", "llm_grid", "patches")}
    equal(kept, {"vit_grid": True, "llm_grid": True, "patches": False}, "read on the host")


@check
def batches_of_requests_reach_the_model_as_it_reads_them(rig: Rig) -> None:
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    processor = rig.processor()
    images = [noise(*size, seed=i) for i, size in enumerate(SIZES)]
    items = []
    for image in images:
        made = rig.apply(processor, [PLACEHOLDER], [image])
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
    images = [noise(640, 480), noise(33, 700)]
    text = f"describe {TEXT}\n\nand the {TEXT} image"
    prompt = tokenizer.encode(text)
    equal(prompt.count(PLACEHOLDER), 2)
    made = processor(text, processor.info.parse_mm_data({"image": images}))
    compare(made, prompt, images, processor.info.vision)


@check
def offline_path_gives_the_same_ids(rig: Rig) -> None:
    """Through the renderer that LLM.generate uses, as text and as ids."""
    from vllm.config import VllmConfig
    from vllm.renderers.registry import renderer_from_config

    renderer = renderer_from_config(VllmConfig(model_config=rig.vision_model_config))
    config = rig.processor().info.vision
    images = [noise(640, 480), noise(33, 700)]
    text = f"what {TEXT} is {TEXT}"
    prompt = renderer.get_tokenizer().encode(text)
    for form in ({"prompt": text}, {"prompt_token_ids": prompt}):
        (made,) = renderer.render_cmpl([{**form, "multi_modal_data": {"image": images}}])
        compare(made, prompt, images, config)


@check
def twenty_images_share_nothing(rig: Rig) -> None:
    processor = rig.processor(cached=True)
    images = [noise(448, 448, seed=i) for i in range(20)]
    order = [i for i in range(20) for _ in range(2)]
    random.Random(0).shuffle(order)
    seen: dict[int, set[str]] = {}
    patches: dict[int, torch.Tensor] = {}
    for index in order:
        made = rig.apply(processor, [5, PLACEHOLDER], [images[index]])
        seen.setdefault(index, set()).add(made["mm_hashes"]["image"][0])
        data = made["mm_kwargs"]["image"][0].get_data()["patches"]
        equal(torch.equal(patches.setdefault(index, data), data), True, "same image")
    equal([len(hashes) for hashes in seen.values()], [1] * 20, "one hash for one image")
    equal(len(set().union(*seen.values())), 20, "hashes")
    equal(len({data.float().sum().item() for data in patches.values()}), 20, "contents")


@check
def a_request_may_ask_for_fewer_tokens(rig: Rig) -> None:
    """Another image to the caches; one that asks for more than there is asks for nothing."""
    processor, image = rig.processor(cached=True), noise(1400, 1400)
    hashes = set()
    for most, limit in ((10**9, 384), (50 * 42**2, 50), (None, 384)):
        made = rig.apply(processor, [PLACEHOLDER], [image], max_pixels=most)
        (place,) = made["mm_placeholders"]["image"]
        equal(limit * 3 // 4 <= place.length <= limit, True, f"{place.length} tokens of {limit}")
        equal(place.get_num_embeds(), len(made["mm_kwargs"]["image"][0].get_data()["perm"]))
        hashes.add(made["mm_hashes"]["image"][0])
    equal(len(hashes), 2, "hashes")


@check
def a_processor_prepares_and_speaks_when_it_is_made(rig: Rig) -> None:
    from vision_exp.model import processor

    with (
        mock.patch.object(processor, "warm_up") as warm,
        mock.patch.object(processor.evidence, "log_once") as said,
    ):
        rig.processor()
    equal((warm.call_count, said.call_args.args), (1, ("processor", rig.vision_model_config)))


@check
def cached_images_may_come_by_uuid_alone(rig: Rig) -> None:
    processor = rig.processor(cached=True)
    image = noise(200, 100)
    with mock.patch("vision_exp.model.items.HashedPixels", side_effect=AssertionError("hashed")):
        first = rig.apply(processor, [PLACEHOLDER], [image], uuids={"image": ["cat"]})
    again = rig.apply(processor, [8, PLACEHOLDER], [None], uuids={"image": ["cat"]})
    equal(again["mm_hashes"]["image"], first["mm_hashes"]["image"])
    compare(again, [8, PLACEHOLDER], [image], processor.info.vision)


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
    image = noise(60, 60)
    compare(
        rig.apply(processor, [4, PLACEHOLDER], [image]),
        [4, PLACEHOLDER],
        [image],
        processor.info.vision,
    )
