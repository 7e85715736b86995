"""What the processor refuses: requests as client errors, another tokenizer at the start."""

from __future__ import annotations

import torch
from checks import check, equal, raises
from PIL import Image
from rig_model import PLACEHOLDER, Rig, noise

IMAGE = 129259


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
    from vllm.exceptions import VLLMValidationError

    processor = rig.processor()
    image = noise(50, 50)
    cases = (
        ("too few placeholders", [5, PLACEHOLDER], [image] * 2, "1 image placeholders"),
        ("no placeholder", [5, 6], [image], "0 image placeholders"),
        ("too many placeholders", [PLACEHOLDER] * 3, [image] * 2, "3 image placeholders"),
        ("reserved id", [IMAGE, PLACEHOLDER], [image], "reserved"),
        ("no image", [PLACEHOLDER], [torch.zeros(6, 4, 5)], "image 0"),
        ("a word", [PLACEHOLDER], ["abc"], "image 0"),
        ("normalized", [PLACEHOLDER], [torch.zeros(3, 4, 5).bfloat16() - 1], "image 0"),
        ("above the limit", [PLACEHOLDER] * 33, [image] * 33, "--limit-mm-per-prompt"),
    )
    for what, prompt, images, text in cases:
        try:
            rig.apply(processor, prompt, images)
        except Exception as error:  # noqa: BLE001  any type: the status is what counts
            equal(status(error), 400, f"{what}: {error!r}")
            equal(isinstance(error, VLLMValidationError), True, f"{what}: {error!r}")
            equal(text in str(error), True, f"{what}: {error}")
        else:
            raise AssertionError(f"{what}: accepted")


@check
def an_uuid_that_nobody_knows_is_a_client_error(rig: Rig) -> None:
    for cached in (False, True):
        try:
            image = noise(50, 50)
            uuids = {"image": [None, "dog"]}
            rig.apply(rig.processor(cached), [PLACEHOLDER] * 2, [image, None], uuids)
        except Exception as error:  # noqa: BLE001  any type: the status is what counts
            equal(status(error), 400, repr(error))
            equal("image 1 is only its uuid 'dog'" in str(error), True, str(error))
        else:
            raise AssertionError("accepted")


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
