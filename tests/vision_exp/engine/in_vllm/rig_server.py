"""A server for the checks of both caches: vLLM's API server, AsyncLLM and engine core process.

Real: the HTTP server, renderer, processor, input processor, client of the engine core, the engine
core's process with its scheduler, the caches on both sides. A stand-in: the model's forward
(tiny_runner.py), whose tokens and log-probabilities follow from the rows that it was given.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import rig_chat as rig
import rig_http
import tiny_config
import tiny_tokenizer
import worker_server

from vision_exp.config import VisionConfig
from vision_exp.image.transform import images_to_patches

CONTEXT = 2048
IMAGES = 4  # of one prompt


def arguments(folder: Path, images: float, kind: str) -> dict[str, Any]:
    """For EngineArgs or LLM: caches that hold `images` sample images. `kind`: "lru" or "shm"."""
    os.environ.update(FAILURES_RUNNER="v1", VLLM_USE_V2_MODEL_RUNNER="0")
    if not (folder / "config.json").exists():
        tiny_tokenizer.write(tiny_config.write(folder))
    shm = {"mm_shm_cache_max_object_size_mb": 2} if kind == "shm" else {}
    return {
        "model": str(folder),
        "max_model_len": CONTEXT,
        "enforce_eager": True,
        "limit_mm_per_prompt": {"image": IMAGES},
        "worker_cls": "worker_server.Worker",
        "mm_processor_cache_gb": images * SIZE / 2**30,
        "mm_processor_cache_type": kind,
        "enable_prefix_caching": False,
        **shm,
    }


def config(folder: Path, images: float, kind: str, **more: Any) -> Any:
    """A server's config, of these arguments and `more` of vLLM's."""
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(**arguments(folder, images, kind), **more).create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = FORK
    made.scheduler_config.async_scheduling = False
    return made


def fork_cores() -> None:
    """Let configs that others make, like LLM, ask for forks too."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config

    def create(*args: Any, **kwargs: Any) -> Any:
        made = stock(*args, **kwargs)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = FORK
        return made

    EngineArgs.create_engine_config = create  # type: ignore[method-assign]


#: vLLM's CPU platform asks for new interpreters, which would import vLLM again.
FORK = "fork"
#: Bytes of one sample image (rig_chat.sample_image) as the processor leaves it.
SIZE = 903_552


class Server(rig_http.Api):
    """A running server; `call` runs a coroutine of its engine."""

    def __init__(self, url: str, engine: Any, loop: Any) -> None:
        model = engine.vllm_config.model_config.model
        super().__init__(url, model, None, None)  # type: ignore[arg-type]
        self.engine, self.loop = engine, loop
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    @property
    def images(self) -> Any:
        """The front end's cache."""
        return self.engine.renderer.mm_processor_cache

    def states(self) -> list[dict[str, Any]]:
        """What `state_of_core` says in the process of each engine core."""
        client = self.engine.engine_core
        ask = client._call_utility_async
        return [self.call(ask("state_of_core", engine=one)) for one in client.core_engines]

    def state(self) -> dict[str, Any]:
        """The same of all engine cores together; images: of one that is the only one."""
        first, *others = self.states()
        for other in others:
            assert other["images"] is None, "each of several engines has a cache of its own"
            first = {name: first[name] + other[name] for name in ("requests", "held", "failed")}
        return {"images": None, **first}

    def break_images(self, *numbers: int) -> None:
        """Let the tower fail on these sample images, and on no others."""
        broken = {mark_of(number): [0] for number in numbers}
        self.call(self.engine.collective_rpc("set_broken", args=(broken,)))

    def unread(self) -> int:
        """Entries of the shared memory that no eviction can pass."""
        storage = self.images.sender._shm_cache
        count = 0
        for key, address in storage.ring_buffer.metadata.items():
            with storage.ring_buffer.access_buf(address) as (data, _):
                count += not storage.default_is_free_check(key, data)
        return count


@lru_cache
def mark_of(number: int) -> float:
    """By which the stand-in's tower knows a sample image."""
    vision = VisionConfig.from_hf_config(SimpleNamespace(**tiny_config.vision_config()))
    return worker_server.mark(images_to_patches([rig.sample_image(number)], vision)[0].patches)


def state_of_core(core: Any) -> dict[str, Any]:
    """What an engine core holds when it has nothing to do."""
    manager = core.scheduler.encoder_cache_manager
    cache = core.mm_receiver_cache
    return {
        "images": None if cache is None else list(cache._cache.order),
        "requests": list(core.scheduler.requests),
        "held": manager.cache_size - manager.num_freeable_slots,
        "failed": core.model_executor.collective_rpc("left")[0],
        "encoded": len(manager.cached),
    }


def teach_core() -> None:
    """Let engine cores that this process forks answer `state_of_core`."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.state_of_core = state_of_core


@contextmanager
def running(vllm_config: Any) -> Iterator[Server]:
    """The API server on a free port, in a thread, with an engine core in a process of its own."""
    import uvicorn
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    teach_core()
    make_parser, build_app, init_app_state = rig_http.api_server()
    words = ["--model", vllm_config.model_config.model, "--enable-prompt-tokens-details"]
    args = make_parser(FlexibleArgumentParser()).parse_args(words)
    found: dict[str, Any] = {}
    ready = threading.Event()

    async def serve(sock: socket.socket) -> None:
        engine = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=False)
        found.update(engine=engine, loop=asyncio.get_running_loop())
        try:
            app = build_app(args, rig_http.TASKS, vllm_config.model_config)
            await init_app_state(engine, app.state, args, rig_http.TASKS)
            web = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
            app.state.server = web
            found.update(web=web)
            ready.set()
            await web.serve(sockets=[sock])
        finally:
            engine.shutdown()

    with rig_http.in_thread(serve, found, ready) as url:
        yield Server(url, found["engine"], found["loop"])
