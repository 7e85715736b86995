"""A request that ends because of an image is an error for its client: the API server's side.

vLLM answers an output that ended with an error with HTTP 500. But its streams pass over an output
without tokens, so a failed request would look like an empty answer that is complete.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import ModuleType
from typing import Any

from vision_exp import patching
from vision_exp.config import is_vision_exp

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.v1.engine.async_llm:AsyncLLM.generate",
    "vllm.v1.engine.async_llm:AsyncLLM.vllm_config",
    "vllm.outputs:RequestOutput.request_id",
    "vllm.outputs:RequestOutput.outputs",
    "vllm.outputs:CompletionOutput.finish_reason",
    "vllm.outputs:CompletionOutput.stop_reason",
    "vllm.exceptions:GenerationError | vllm.entrypoints.openai.engine.protocol:GenerationError",
)

MESSAGE = "The request failed on an image. The server's log says why."

logger = logging.getLogger("vllm.vision_exp")


def install() -> None:
    """Wrap the engine's client in the API server once it is imported."""
    patching.when_imported("vllm.v1.engine.async_llm", _wrap)


def _wrap(module: ModuleType) -> None:
    patching.wrap(module.AsyncLLM, "generate", _generate)


def _generate(original: Any, engine: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
    outputs = original(engine, *args, **kwargs)
    if not is_vision_exp(engine.vllm_config.model_config.hf_config):
        return outputs
    return _raising(outputs)


async def _raising(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    # Closed with this one, or a client that hangs up would not end its request.
    async with aclosing(outputs):
        async for output in outputs:
            for one in output.outputs:
                # Only failed_requests.py gives a reason; other errors are vLLM's to answer.
                if one.finish_reason == "error" and isinstance(one.stop_reason, str):
                    logger.error("[vision-exp] %s failed: %s", output.request_id, one.stop_reason)
                    raise _generation_error()(MESSAGE)
            yield output


def _generation_error() -> type[Exception]:
    """What this vLLM answers with HTTP 500, in a stream with an error event."""
    from vllm import exceptions

    if hasattr(exceptions, "GenerationError"):
        return exceptions.GenerationError
    from vllm.entrypoints.openai.engine.protocol import GenerationError

    return GenerationError
