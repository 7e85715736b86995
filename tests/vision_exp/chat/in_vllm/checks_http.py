"""Checks over HTTP: vLLM's own API server and AsyncLLM, the `openai` package as the client.

Only the engine behind AsyncLLM is a stand-in: it answers every request with one token. Everything
that decides a status code is real: validation, rendering, processing, input processor, handlers.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import rig_chat as rig
from checks_chat_images import bad_parts
from conversations import ASK
from rig_chat import SENTINEL, part, text

from vision_exp.engine.failures import client
from vision_exp.layout import PLACEHOLDER

TOKEN = 50
TASKS = ("generate",)


class Core:
    """Stands in for the engine: records requests, answers each with one token."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.failure: str | None = None  # ends the next requests as failed_requests.py does
        self.engine_ranks_managed = [0]
        self.resources = type("Resources", (), {"engine_dead": False})()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return TASKS

    async def add_request_async(self, request: Any) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        self.requests.append(request)
        output = EngineCoreOutput(request.request_id, [TOKEN], finish_reason=FinishReason.LENGTH)
        if self.failure:
            output = EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=FinishReason.ERROR,
                stop_reason=self.failure,
            )
        await self._queue.put(EngineCoreOutputs(outputs=[output]))

    async def get_output_async(self) -> Any:
        return await self._queue.get()

    async def abort_requests_async(self, request_ids: Any) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass


def api_server() -> tuple[Any, Any, Any]:
    """(argument parser maker, build_app, init_app_state): 0.29 has moved them."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ModuleNotFoundError:
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser, build_app, init_app_state


class Api:
    """A running server."""

    def __init__(self, url: str, model: str, core: Core) -> None:
        self.url, self.model, self.core = url, model, core
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def chat(self, messages: Any, **more: Any) -> Any:
        return self.client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=1, **more
        )

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        try:
            return 200, json.loads(self.text(path, body))
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def text(self, path: str, body: dict[str, Any]) -> str:
        """The body of an answer. Raises HTTPError unless its status is 200."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def last_ids(self) -> list[int]:
        return self.core.requests[-1].prompt_token_ids

    def last_images(self) -> int:
        return len(self.core.requests[-1].mm_features or ())


@contextmanager
def running(server: rig.Server) -> Any:
    """The API server over the renderer's config, on a free port, in a thread."""
    import uvicorn
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine import async_llm

    make_parser, build_app, init_app_state = api_server()
    model = server.config.model_config.model
    arguments = ["--model", model, "--enable-prompt-tokens-details"]
    args = make_parser(FlexibleArgumentParser()).parse_args(arguments)
    found: dict[str, Any] = {}
    ready = threading.Event()

    async def serve(sock: socket.socket) -> None:
        core = Core()
        stock = async_llm.EngineCoreClient.make_async_mp_client
        async_llm.EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
        try:
            engine = async_llm.AsyncLLM(server.config, executor_class=None, log_stats=False)
        finally:
            async_llm.EngineCoreClient.make_async_mp_client = stock
        app = build_app(args, TASKS, server.config.model_config)
        await init_app_state(engine, app.state, args, TASKS)
        web = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        app.state.server = web
        found.update(core=core, web=web)
        ready.set()
        await web.serve(sockets=[sock])
        engine.shutdown()

    def target(sock: socket.socket) -> None:
        try:
            asyncio.run(serve(sock))
        except Exception as error:  # noqa: BLE001 - raised again by the waiting thread
            found["error"] = error
        finally:
            ready.set()

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(16)
        thread = threading.Thread(target=target, args=(sock,), daemon=True)
        thread.start()
        ready.wait(120)
        if "error" in found:
            raise found["error"]
        api = Api(f"http://127.0.0.1:{sock.getsockname()[1]}", model, found["core"])
        try:
            yield api
        finally:
            found["web"].should_exit = True
            thread.join(20)


def status_400(action: Any, *fragments: str) -> None:
    try:
        action()
    except openai.BadRequestError as error:
        for fragment in fragments:
            assert fragment in str(error), f"{fragment!r} not in {error}"
    else:
        raise AssertionError(f"accepted; expected {fragments}")


USER = {"role": "user", "content": [text("see"), part(0), text("and"), part(1)]}


def check_http_chat(api: Api) -> None:
    answer = api.chat([USER])
    ids = api.last_ids()
    assert answer.usage.prompt_tokens == len(ids) and api.last_images() == 2
    image_tokens = sum(token in rig.SENTINEL_IDS for token in ids)
    details = answer.usage.prompt_tokens_details
    assert details.multimodal_tokens == {"image": image_tokens}, details
    api.chat([{"role": "system", "content": f"quote {PLACEHOLDER} <image>"}, USER])
    assert api.last_images() == 2
    chunks = list(api.chat([USER], stream=True))
    assert chunks and api.last_ids() == ids


def check_http_roles(api: Api) -> None:
    for role, extra in (("system", {}), ("assistant", {}), ("tool", {"tool_call_id": "c1"})):
        bad = {"role": role, "content": [part(0)], **extra}
        for stream in (False, True):
            status_400(
                lambda b=bad, s=stream: api.chat([ASK, b, ASK], stream=s),
                "messages[1].content[0]",
                role,
            )
    api.chat([USER])


def check_http_bad_pictures(api: Api) -> None:
    for name, bad in bad_parts().items():
        if name == "nothing":
            continue  # the server's own validation refuses it
        for stream in (False, True):
            status_400(
                lambda b=bad, s=stream: api.chat(
                    [{"role": "user", "content": [text("a"), b]}], stream=s
                ),
                "messages[0].content[1]",
            )
        api.chat([USER])
        assert api.last_images() == 2, name


def check_http_limit(api: Api) -> None:
    parts = [part(number) for number in range(rig.LIMIT + 1)]
    status_400(lambda: api.chat([{"role": "user", "content": parts}]), "--limit-mm-per-prompt")
    api.chat([{"role": "user", "content": parts[1:]}])
    assert api.last_images() == rig.LIMIT


def check_http_reserved_ids(api: Api) -> None:
    """Every endpoint that takes a prompt, streams included, and the next request works."""
    complete = api.client.completions.create
    for token in (129257, 129261, 129264):
        for stream in (False, True):
            status_400(
                lambda t=token, s=stream: complete(
                    model=api.model, prompt=[5, t], max_tokens=1, stream=s
                ),
                str(token),
            )
        body = {"token_ids": [5, token], "sampling_params": {"max_tokens": 1}}
        code, answer = api.post("/inference/v1/generate", body)
        assert code == 400 and str(token) in str(answer), (code, answer)
    for words in (PLACEHOLDER, SENTINEL):
        status_400(
            lambda w=words: complete(model=api.model, prompt=f"a {w}", max_tokens=1), "reserved"
        )
        code, answer = api.post("/tokenize", {"model": api.model, "prompt": words})
        assert code == 400, (code, answer)
    assert complete(model=api.model, prompt=[5, 6], max_tokens=1).choices
    code, answer = api.post("/inference/v1/generate", {**body, "token_ids": [5, 6]})
    assert code == 200, answer


def check_http_tokenize(api: Api) -> None:
    code, answer = api.post("/tokenize", {"model": api.model, "messages": [USER]})
    assert code == 200, answer
    api.chat([USER])
    assert answer["tokens"] == api.last_ids()


def check_http_responses(api: Api) -> None:
    image = {"type": "input_image", "image_url": part(0)["image_url"]["url"], "detail": "auto"}
    words = {"type": "input_text", "text": f"a {PLACEHOLDER}"}
    make = api.client.responses.create
    content = [words, image, words, image]
    make(model=api.model, input=[{"role": "user", "content": content}], max_output_tokens=1)
    api.core.requests.pop()
    make(model=api.model, input=[{"role": "user", "content": content}], max_output_tokens=1)
    assert api.last_images() == 2
    for role in ("system", "developer"):
        bad = [{"role": role, "content": [image]}, {"role": "user", "content": "x"}]
        status_400(
            lambda b=bad: make(model=api.model, input=b, max_output_tokens=1), role, "content[0]"
        )


def check_http_anthropic(api: Api) -> None:
    data = part(0)["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    image = {"type": "image", "source": source}
    words = {"type": "text", "text": f"{PLACEHOLDER}"}
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [words, image]}
    for messages, images in (
        ([{"role": "user", "content": [words, image, words]}], 1),
        (
            [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ],
            1,
        ),
    ):
        body = {"model": api.model, "max_tokens": 1, "messages": messages}
        code, answer = api.post("/v1/messages", body)
        assert code == 200, answer
        assert api.last_images() == images
    bad = {**source, "data": "aGVsbG8="}
    body["messages"] = [{"role": "user", "content": [{"type": "image", "source": bad}]}]
    code, answer = api.post("/v1/messages", body)
    assert code == 400 and "content[0]" in str(answer), (code, answer)


def check_http_render(api: Api) -> None:
    """What one server renders, another takes, unless its ids were changed on the way."""
    code, rendered = api.post(
        "/v1/chat/completions/render", {"model": api.model, "messages": [USER], "max_tokens": 1}
    )
    assert code == 200, rendered
    code, answer = api.post("/inference/v1/generate", rendered)
    assert code == 200, answer
    api.chat([USER])
    direct, sent = (api.core.requests[i].mm_features for i in (-1, -2))
    for one, other in zip(direct, sent, strict=True):
        assert one.mm_position.get_num_embeds() == other.mm_position.get_num_embeds()
        assert one.mm_position.is_embed.equal(other.mm_position.is_embed)
    ids = rendered["token_ids"]
    start = ids.index(129257)
    places = json.loads(json.dumps(rendered["features"]["mm_placeholders"]))
    places["image"][1]["offset"] += 4
    moved = {**rendered, "features": {**rendered["features"], "mm_placeholders": places}}
    code, answer = api.post("/inference/v1/generate", moved)
    assert code == 400, (code, answer)
    for change in (
        [*ids, 129259],
        [*ids[:start], 129259, *ids[start + 1 :]],
        [*ids[:start], 5, *ids[start + 1 :]],
        [5, *ids[:-1]],
    ):
        code, answer = api.post("/inference/v1/generate", {**rendered, "token_ids": change})
        assert code == 400, (code, answer)


def check_http_failed_picture(api: Api) -> None:
    """A request that the engine ends with an error gets 500, and the next one an answer."""
    image = {"type": "input_image", "image_url": part(0)["image_url"]["url"], "detail": "auto"}
    turn = [{"role": "user", "content": [image]}]
    respond = api.client.responses.create
    api.core.failure = "an image cannot be encoded"
    try:
        for n in (1, 2):
            answered_500(lambda n=n: api.chat([USER], n=n))
            # The status of a stream is out before the picture fails; it ends with an error.
            broken_stream(lambda n=n: api.chat([USER], n=n, stream=True))
        answered_500(lambda: respond(model=api.model, input=turn, max_output_tokens=1))
        broken_stream(lambda: respond(model=api.model, input=turn, stream=True))
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}}
        code, answer = api.post("/inference/v1/generate", body)
        assert code == 500, answer
        messages = {"model": api.model, "max_tokens": 1, "messages": [{**ASK}], "stream": True}
        events = api.text("/v1/messages", messages)
        assert "event: error" in events and "end_turn" not in events, events
    finally:
        api.core.failure = None
    assert api.chat([USER]).choices[0].finish_reason == "length"
    assert [c.choices[0].finish_reason for c in api.chat([USER], stream=True)][-1] == "length"


def answered_500(action: Any) -> None:
    try:
        action()
    except openai.InternalServerError as error:
        assert error.status_code == 500 and client.MESSAGE in str(error), error
    else:
        raise AssertionError("answered")


def broken_stream(action: Any) -> None:
    found: list[Any] = []
    try:
        found.extend(action())
    except (openai.APIError, httpx.TransportError):
        pass
    else:
        raise AssertionError(f"a stream that looks complete: {found}")
