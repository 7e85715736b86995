"""A request that the engine ends with an error is an error for its client, with the cause.

Whoever ended it: an image that failed (scheduler.py says which way), or vLLM itself. Its streams
pass over an output without tokens, so such a request would look like an empty answer that is
complete; `LLM.chat` returns it like any other; and the stream of the Responses API breaks off,
since vLLM's error is none of that API's events.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

MESSAGE = "The request failed and has no answer. Nothing else is affected; it can be sent again."
UNKNOWN = "the engine ended it with an error, see the server's log"
#: Characters of a cause that a client is told.
MOST = 500

logger = logging.getLogger("vllm.vision_exp")


class RequestsFailed(RuntimeError):
    """Requests of an offline batch ended with an error; `outputs` has the answers of all."""

    def __init__(self, causes: dict[str, str], outputs: Sequence[Any]) -> None:
        self.causes, self.outputs = causes, list(outputs)
        told = "; ".join(f"request {name}: {cause}" for name, cause in causes.items())
        super().__init__(
            f"[vision-exp] {len(causes)} of {len(outputs)} requests failed. Nothing else is "
            "affected: the other answers are in this exception's `outputs`, and the failed ones "
            f"can be sent again. {told[: 4 * MOST]}"
        )


def cause(output: Any) -> str | None:
    """Why a RequestOutput ended with an error; None if it did not."""
    for one in output.outputs:
        if one.finish_reason == "error":
            reason = one.stop_reason
            return reason[:MOST] if isinstance(reason, str) and reason else UNKNOWN
    return None


async def raise_failures(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """What a request's `outputs` yield, until one says that it failed.

    Then vLLM's GenerationError is raised, and the server's log has the cause.
    """
    # Closed with this one, or a client that hangs up would not end its request.
    async with aclosing(outputs):
        async for output in outputs:
            reason = cause(output)
            if reason is not None:
                logger.error("[vision-exp] %s failed: %s", output.request_id, reason)
                raise _generation_error()(f"{MESSAGE} Cause: {reason}")
            yield output


def check_batch(outputs: Sequence[Any]) -> None:
    """Raise RequestsFailed if one of an offline batch's outputs ended with an error."""
    answers = [one for one in outputs if isinstance(one.outputs, list)]
    found = {one.request_id: cause(one) for one in answers}
    causes = {name: reason for name, reason in found.items() if reason is not None}
    if causes:
        raise RequestsFailed(causes, outputs)


async def end_with_error(events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The `events` of a Responses stream; if they break off, an `error` event ends them.

    Its form is that of https://platform.openai.com/docs/api-reference/responses-streaming/error,
    with the `error` object that OpenAI's clients raise.
    """
    count = 0
    async with aclosing(events):
        try:
            async for event in events:
                yield event
                count += 1
        except Exception as error:
            if not isinstance(error, _generation_error()):
                logger.error("[vision-exp] a stream of responses broke off", exc_info=error)
            yield _error_event(str(error)[: 2 * MOST], count)


def _error_event(message: str, number: int) -> Any:
    from openai.types.responses import ResponseErrorEvent

    told = {"type": "server_error", "code": "server_error", "message": message, "param": None}
    return ResponseErrorEvent.model_validate(
        {**told, "type": "error", "sequence_number": number, "error": told}
    )


def _generation_error() -> type[Exception]:
    """What this vLLM answers with HTTP 500, in a stream with an error event."""
    from vllm import exceptions

    if hasattr(exceptions, "GenerationError"):
        return exceptions.GenerationError
    from vllm.entrypoints.openai.engine.protocol import GenerationError

    return GenerationError
