"""A request that ends because of an image is an error for its client: the API server's side.

vLLM answers an output that ended with an error with HTTP 500. But its streams pass over an output
without tokens, so a failed request would look like an empty answer that is complete.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

MESSAGE = "The request failed on an image. The server's log says why."

logger = logging.getLogger("vllm.vision_exp")


async def raise_failures(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """What a request's `outputs` yield, until one says that it failed on an image.

    Then vLLM's GenerationError is raised, and the server's log has the reason.
    """
    # Closed with this one, or a client that hangs up would not end its request.
    async with aclosing(outputs):
        async for output in outputs:
            for one in output.outputs:
                # Only scheduler.py gives a reason; other errors are vLLM's to answer.
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
