"""What clients get for a request that the engine ends with an error, by every API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import rig_chat as rig
import rig_server
from rig_server import Server
from sequences import first_token, messages

CAUSE = "broke the tower"
BAD = 3  # a sample image


def told(action: Callable[[], Any], *kinds: type[Exception]) -> None:
    """The action ends with an error of the API's client that says why."""
    try:
        found = action()
    except kinds as error:
        assert CAUSE in str(error), error
    else:
        raise AssertionError(f"looks complete: {found}")


def check_apis(server: Server) -> None:
    fresh = first_token(server, [BAD])
    # Its rows leave the encoder cache, or the tower would not be asked again.
    server.call(server.engine.reset_encoder_cache())
    server.break_images(BAD)
    try:
        for n in (1, 2):
            turn = messages([BAD])
            told(lambda t=turn, n=n: server.chat(t, n=n), openai.InternalServerError)
            told(lambda t=turn, n=n: list(server.chat(t, n=n, stream=True)), openai.APIError)
        responses(server)
        anthropic_messages(server)
        token_ids(server)
    finally:
        server.break_images()
    assert first_token(server, [BAD]) == fresh


def responses(server: Server) -> None:
    url = rig.part(BAD)["image_url"]["url"]
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    options: Any = {"model": server.model, "input": [{"role": "user", "content": [image]}]}
    make = server.client.responses.create
    told(lambda: make(**options, max_output_tokens=2), openai.InternalServerError)
    told(lambda: list(make(**options, max_output_tokens=2, stream=True)), openai.APIError)
    text = server.text("/v1/responses", {**options, "max_output_tokens": 2, "stream": True})
    assert "event: error\n" in text and "response.completed" not in text, text


def anthropic_messages(server: Server) -> None:
    data = rig.part(BAD)["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    turn: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    options: Any = {"model": server.model, "max_tokens": 2, "messages": turn}
    told(lambda: client.messages.create(**options), anthropic.APIError)
    told(lambda: list(client.messages.create(**options, stream=True)), anthropic.APIError)


def token_ids(server: Server) -> None:
    """The endpoint that takes a rendered prompt, images included."""
    turn = {"model": server.model, "messages": messages([BAD]), "max_tokens": 1}
    code, rendered = server.post("/v1/chat/completions/render", turn)
    assert code == 200, rendered
    code, answer = server.post("/inference/v1/generate", rendered)
    assert code == 500 and CAUSE in answer, (code, answer)
    text = server.text("/inference/v1/generate", {**rendered, "stream": True})
    assert '"error"' in text and CAUSE in text, text


def check_offline(folder: Path) -> None:
    """`LLM.chat`: an exception, never an empty output; and a refused batch hurts no later one."""
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vision_exp.engine.failures.client import RequestsFailed

    rig_server.teach_core()
    rig_server.fork_cores()
    llm = LLM(**rig_server.arguments(folder, 2.5, "lru"), async_scheduling=False)
    try:
        offline(llm, SamplingParams(max_tokens=1), RequestsFailed, VLLMValidationError)
    finally:
        llm.llm_engine.engine_core.shutdown()


def offline(llm: Any, one: Any, failed: type[Exception], refused: type[Exception]) -> None:
    def chat(*batch: tuple[int, ...]) -> list[int]:
        answers = llm.chat([messages(images) for images in batch], one, use_tqdm=False)
        return [answer.outputs[0].token_ids[0] for answer in answers]

    (fresh,) = chat((1,))
    bad = [{"role": "system", "content": [rig.part(0)]}]
    too_long = [{"role": "user", "content": [rig.text("word " * 3000), rig.part(2)]}]
    for broken in (bad, too_long):
        try:
            llm.chat([messages([0, 4]), broken], one, use_tqdm=False)
        except (refused, ValueError):
            continue
        raise AssertionError("accepted")
    assert len(chat((0,), (4,), (2,), (0, 2, 4))) == 4
    llm.collective_rpc("set_broken", args=({rig_server.mark_of(BAD): [0]},))
    try:
        chat((1,), (BAD,), (2,))
    except failed as error:
        assert CAUSE in str(error) and "1 of 3" in str(error), error
        kept = [len(output.outputs[0].token_ids) for output in error.outputs]  # type: ignore[attr-defined]
        assert kept == [1, 0, 1], kept
    else:
        raise AssertionError("an empty output, and no exception")
    llm.collective_rpc("set_broken", args=({},))
    assert chat((BAD,), (1,))[1] == fresh
    core = llm.llm_engine.engine_core
    sender = llm.llm_engine.renderer.mm_processor_cache.sender
    assert list(sender._cache.order) == core.call_utility("state_of_core")["images"]
