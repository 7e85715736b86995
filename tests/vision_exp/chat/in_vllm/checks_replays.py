"""Checks over HTTP of prompts that come back: a prefill server's ids and replays of them."""

from __future__ import annotations

from typing import Any

import rig_chat as rig
import rig_http
from checks_clients import error_of, same_features, user
from conversations import ASK
from rig_chat import part, text
from rig_http import Api

from vision_exp.layout import END_ID, IMAGE_ID, START_ID


def check_clients_prefill_and_decode(api: Api) -> None:
    """A second server gets the first one's ids, in vLLM's ways and in changed forms."""
    messages = [
        {"role": "system", "content": "be kind"},
        user(text("see"), part(0), text("and"), part(1)),
    ]
    made = api.chat(messages, extra_body={"return_token_ids": True})
    ids = made.prompt_token_ids
    assert ids == api.last_ids() and START_ID in ids
    first = api.core.requests[-1].mm_features
    with rig_http.running(api.server) as decode:

        def sent(prompt: list[int], images: Any = messages, **more: Any) -> Any:
            params = {"do_remote_prefill": True, "prompt_token_ids": prompt}
            return decode.chat(images, extra_body={"kv_transfer_params": params, **more})

        sent(ids)
        same_features(first, decode.core.requests[-1].mm_features)
        assert decode.last_ids() == ids
        reused = hasattr(vllm_online_renderer(), "_reused_prompt_token_ids")  # from 0.27 on
        if reused:
            # Text that the decode server would write otherwise is the prefill server's.
            end = ids.index(START_ID) - 3
            other = [*ids[:2], 7, 7, 7, 7, *ids[2:]]  # the same position modulo 4
            sent(other)
            assert decode.last_ids() == other and decode.last_images() == 2
            for changed in (
                [7, *ids],  # not where these blocks belong
                [*ids[:end], *ids[ids.index(END_ID) + 1 :]],  # one image less
                [*ids, START_ID],
                [*ids, IMAGE_ID],
                [*ids, rig.PLACEHOLDER_ID],
                [t for t in ids if t != IMAGE_ID],
                [t for t in ids if t not in rig.RESERVED],
            ):
                error_of(lambda c=changed: sent(c))
            error_of(lambda: sent(ids, [ASK]))
            error_of(lambda: sent(ids, [user(part(0), rig_wide())]))
            sent([5, 6, 7], [ASK])
            assert decode.last_ids() == [5, 6, 7]
        # Completions take no images, so ids of images have none to be compared with.
        complete = decode.client.completions.create
        error = error_of(lambda: complete(model=api.model, prompt=ids, max_tokens=1))
        assert "same images" in str(error)
        replay = {
            "token_ids": ids,
            "sampling_params": {"max_tokens": 1},
            "content_parts": [
                {"type": "image_url", "url": part(n)["image_url"]["url"]} for n in (0, 1)
            ],
        }
        if content_parts():
            code, answer = decode.post("/inference/v1/generate", replay)
            assert code == 200, answer
            same_features(first, decode.core.requests[-1].mm_features)
            replay["token_ids"] = [7, *ids]
            code, answer = decode.post("/inference/v1/generate", replay)
            assert code == 400 and "block of image 0" in answer, answer


def vllm_online_renderer() -> Any:
    from vllm.renderers import online_renderer

    return online_renderer


def content_parts() -> bool:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    return "content_parts" in GenerateRequest.model_fields


def rig_wide() -> dict[str, Any]:
    data = rig.png(rig.sample_image(1, (900, 44)))
    return {"type": "image_url", "image_url": {"url": rig.data_url(data)}}
