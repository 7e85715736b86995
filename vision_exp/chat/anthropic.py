"""Before 0.28 vLLM's Anthropic endpoint answers every error with 500; a refused chat is a 400."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vision_exp import patching
from vision_exp.config import is_vision_exp

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.count_tokens",
    "vllm.entrypoints.serve.engine.serving:BaseServing.create_error_response(message)"
    " | vllm.entrypoints.openai.engine.serving:OpenAIServing.create_error_response(message)",
    "vllm.entrypoints.serve.engine.serving:BaseServing.model_config"
    " | vllm.entrypoints.openai.engine.serving:OpenAIServing.model_config",
    "vllm.exceptions:VLLMValidationError",
)


def install() -> None:
    """Wrap the endpoint's two methods once they are imported."""
    patching.when_imported("vllm.entrypoints.anthropic.serving", _wrap)


def _wrap(module: ModuleType) -> None:
    patching.wrap(module.AnthropicServingMessages, "create_messages", _answer_client_errors)
    patching.wrap(module.AnthropicServingMessages, "count_tokens", _answer_client_errors)


async def _answer_client_errors(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    try:
        return await original(self, *args, **kwargs)
    except VLLMValidationError as error:
        if not is_vision_exp(self.model_config.hf_config):
            raise
        return self.create_error_response(error)
