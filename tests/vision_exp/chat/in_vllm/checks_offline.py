"""Checks of `LLM.chat` and `LLM.generate`, with a stand-in for the engine behind them."""

from __future__ import annotations

from typing import Any

import rig_chat as rig
from rig_chat import SENTINEL, part, pil, refused, text

from vision_exp.layout import PLACEHOLDER


class Core:
    """Stands in for the engine: records requests, answers each with one token."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.waiting: list[Any] = []

    def add_request(self, request: Any) -> None:
        self.requests.append(request)
        self.waiting.append(request)

    def get_output(self) -> Any:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        done = [
            EngineCoreOutput(request.request_id, [50], finish_reason=FinishReason.LENGTH)
            for request in self.waiting
        ]
        self.waiting.clear()
        return EngineCoreOutputs(outputs=done)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def dp_engines_running(self) -> bool:
        return False

    def abort_requests(self, request_ids: Any) -> None:
        pass

    def reset_mm_cache(self) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass


def check_offline(server: rig.Server) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.engine import llm_engine

    core = Core()
    stock = llm_engine.EngineCoreClient.make_client
    llm_engine.EngineCoreClient.make_client = staticmethod(lambda **_: core)
    try:
        llm = LLM(
            model=server.config.model_config.model,
            max_model_len=8192,
            enforce_eager=True,
            limit_mm_per_prompt={"image": rig.LIMIT},
        )
    finally:
        llm_engine.EngineCoreClient.make_client = stock
    one = SamplingParams(max_tokens=1)
    words = text(f"a {PLACEHOLDER}")
    messages = [{"role": "user", "content": [words, part(0), text("b"), pil(1)]}]
    template = {"thinking": False}
    llm.chat(messages, one, use_tqdm=False, chat_template_kwargs=template)
    expected = server.chat(messages, **template)["prompt_token_ids"]
    assert core.requests[-1].prompt_token_ids == expected
    assert len(core.requests[-1].mm_features) == 2
    bad = [{"role": "system", "content": [part(0)]}]
    refused(lambda: llm.chat(bad, one, use_tqdm=False), "messages[0].content[0]", "system")
    for batch, number in (([messages, bad], 1), ([messages, messages, bad], 2)):
        where = f"item {number} of the {len(batch)} (from 0): messages[0].content[0]"
        refused(lambda b=batch: llm.chat(b, one, use_tqdm=False), where)
    for prompt in ({"prompt_token_ids": [5, 129257]}, SENTINEL, PLACEHOLDER):
        refused(lambda p=prompt: llm.generate(p, one, use_tqdm=False), "reserved")
    image = {"prompt_token_ids": [5, 129264], "multi_modal_data": {"image": rig.sample_image(0)}}
    llm.generate(image, one, use_tqdm=False)
    assert len(core.requests[-1].mm_features) == 1
    made = core.requests[-1].prompt_token_ids
    llm.generate({**image, "prompt_token_ids": made}, one, use_tqdm=False)
    assert core.requests[-1].prompt_token_ids == made and 129259 in made
    places = [core.requests[i].mm_features[0].mm_position for i in (-1, -2)]
    assert places[0] == places[1]
    moved = {**image, "prompt_token_ids": [5, *made]}
    refused(lambda: llm.generate(moved, one, use_tqdm=False), "block of image 0 at position 2")
