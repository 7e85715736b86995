"""vLLM's own API server and AsyncLLM for the checks over HTTP, with the official clients.

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

import anthropic
import openai
import rig_chat as rig

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

    def __init__(self, url: str, model: str, core: Core, server: rig.Server) -> None:
        self.url, self.model, self.core, self.server = url, model, core, server
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

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

    with in_thread(serve, found, ready) as url:
        yield Api(url, model, found["core"], server)


@contextmanager
def in_thread(serve: Any, found: dict[str, Any], ready: threading.Event) -> Any:
    """The URL of what ``serve(socket)`` serves in a thread of its own, until the block ends.

    It sets ``ready`` once it listens, with its uvicorn server as ``found["web"]``.
    """

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
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            found["web"].should_exit = True
            thread.join(20)
