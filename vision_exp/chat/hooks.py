"""Chat messages with images: wraps the DeepSeek-V4 renderer, for vision checkpoints only.

Chat Completions, Responses, Anthropic messages and `LLM.chat` all go through its
`render_messages`. The wrapper takes the image parts out, lets vLLM render text, and puts one
placeholder token per image where its part stood; the multimodal processor expands those.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from vision_exp import patching
from vision_exp.chat import anthropic, reserved, rules
from vision_exp.chat import images as messages_images
from vision_exp.chat.rules import Chat, RuleError
from vision_exp.config import is_vision_exp

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.exceptions:VLLMValidationError",
    "vllm.renderers.base:BaseRenderer.__init__",
    "vllm.renderers.base:BaseRenderer._executor",
    "vllm.renderers.base:BaseRenderer.default_chat_tok_params",
    "vllm.renderers.base:BaseRenderer.get_tokenizer",
    "vllm.renderers.base:BaseRenderer.model_config",
    "vllm.renderers.params:TokenizeParams.add_special_tokens",
    "vllm.renderers.params:ChatParams.chat_template_kwargs",
    "vllm.renderers.params:ChatParams.media_io_kwargs",
    "vllm.renderers.deepseek_v4:DeepseekV4Renderer.render_messages(messages, params)",
    "vllm.renderers.deepseek_v4:DeepseekV4Renderer.render_messages_async(messages, params)",
    "vllm.config.model:ModelConfig.allowed_local_media_path",
    "vllm.config.model:ModelConfig.allowed_media_domains",
    "vllm.config.multimodal:MultiModalConfig.get_limit_per_prompt(modality)",
    "vllm.config.multimodal:MultiModalConfig.media_io_kwargs",
    "vllm.envs:VLLM_MEDIA_CONNECTOR",
    "vllm.multimodal.media:MEDIA_CONNECTOR_REGISTRY",
    "vllm.multimodal.media.connector:MediaConnector.__init__("
    "media_io_kwargs, allowed_local_media_path, allowed_media_domains)",
    "vllm.utils.registry:ExtensionManager.load(cls_name, **)",
    "vllm.inputs.llm:TokensPrompt.prompt_token_ids",
    "vllm.inputs.llm:TokensPrompt.prompt",
    "vllm.inputs.llm:_PromptOptions.multi_modal_data",
    "vllm.inputs.llm:_PromptOptions.multi_modal_uuids",
)

RUST_VARIABLE = "VLLM_USE_RUST_FRONTEND"
_IMAGE_IN_TEXT = re.compile(r"data:image/[\w.+-]+;base64,[A-Za-z0-9+/]{256}")

logger = logging.getLogger("vllm.vision_exp")
_warned_image_in_text = False


def install() -> None:
    """Wrap the renderer once it is imported.

    Raises RuntimeError under the Rust front end, ValueError for a wrong setting: a process that
    sees a vision checkpoint must not start with either.
    """
    if os.environ.get(RUST_VARIABLE, "0").strip().lower() not in ("", "0", "false"):
        raise RuntimeError(
            f"{RUST_VARIABLE}=1 renders chats outside Python, where images cannot be handled: "
            f"unset {RUST_VARIABLE} to serve this vision checkpoint"
        )
    rules.policy_from_environment()
    anthropic.install()
    patching.when_imported("vllm.renderers.base", _wrap_base)
    patching.when_imported("vllm.renderers.deepseek_v4", _wrap_renderer)


def _wrap_base(module: ModuleType) -> None:
    patching.wrap(module.BaseRenderer, "__init__", _init)


def _wrap_renderer(module: ModuleType) -> None:
    patching.wrap(module.DeepseekV4Renderer, "render_messages", _render_messages)
    patching.wrap(module.DeepseekV4Renderer, "render_messages_async", _render_messages_async)


def bad_request(message: str) -> Exception:
    """The exception that this vLLM answers with HTTP 400. Not a ValueError on every release."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message)


def is_vision(renderer: Any) -> bool:
    """True if the renderer serves a Vision-Exp checkpoint."""
    return is_vision_exp(getattr(renderer.model_config, "hf_config", None))


def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if not is_vision(self):
        return
    if not any(base.__name__ == "DeepseekV4Renderer" for base in type(self).__mro__):
        raise RuntimeError(
            f"{type(self).__name__} cannot render chats of this vision checkpoint: "
            "leave --tokenizer-mode out, or set it to deepseek_v4"
        )
    # A multimodal renderer would add special tokens to chats by default; the template has them
    # already, and text-only DeepSeek-V4 adds none.
    chat = self.default_chat_tok_params
    self.default_chat_tok_params = dataclasses.replace(chat, add_special_tokens=False)


def _render_messages(original: Any, self: Any, messages: Any, params: Any) -> Any:
    if not is_vision(self):
        return original(self, messages, params)
    request = _Request(self, messages, params)
    with _client_errors():
        images = messages_images.load(request.sources, request.connector())
    conversation, prompt = original(self, request.messages, request.params)
    return request.finish(conversation, prompt, images)


async def _render_messages_async(original: Any, self: Any, messages: Any, params: Any) -> Any:
    if not is_vision(self):
        return await original(self, messages, params)
    request = _Request(self, messages, params)
    with _client_errors():
        images = await messages_images.load_async(request.sources, request.connector())
    conversation, prompt = await original(self, request.messages, request.params)
    if not request.needs_ids(prompt):
        return conversation, prompt
    # Tokenising blocks, so it belongs on the renderer's pool, where vLLM does its own.
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._executor, request.finish, conversation, prompt, images)


@contextlib.contextmanager
def _client_errors() -> Iterator[None]:
    try:
        yield
    except RuleError as error:
        raise bad_request(str(error)) from error


class _Request:
    """One chat on its way through the renderer: `messages` and `params` are for vLLM, text only."""

    def __init__(self, renderer: Any, messages: Sequence[Any], params: Any) -> None:
        self._renderer = renderer
        self._marks = reserved.Marks()
        policy = rules.policy_from_environment(image_limit(renderer.model_config))
        with _client_errors():
            chat = rules.read_chat(messages, policy, self._marks.image)
            self.sources = [messages_images.source_of(image) for image in chat.images]
        _warn_of_images_in_text(chat)
        self.messages = self._marks.hide([_with_plain_arguments(m) for m in chat.messages])
        # Marks are for strings: the template must not tokenise.
        template = {**self._marks.hide(params.chat_template_kwargs), "tokenize": False}
        self.params = dataclasses.replace(params, chat_template_kwargs=template)

    def connector(self) -> Any:
        """vLLM's loader of pictures, with this request's options; None if there is none to load."""
        if not self.sources:
            return None
        import vllm.envs as envs
        from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

        config = self._renderer.model_config
        options = self.params.media_io_kwargs or config.multimodal_config.media_io_kwargs
        return MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR,
            media_io_kwargs=options,
            allowed_local_media_path=config.allowed_local_media_path,
            allowed_media_domains=config.allowed_media_domains,
        )

    def needs_ids(self, prompt: Any) -> bool:
        """False if vLLM's own tokenisation of the rendered text is right."""
        if "prompt" not in prompt:
            raise RuntimeError("the chat template gave no text, so images cannot be placed in it")
        text = self._marks.reveal(prompt["prompt"])
        return bool(self.sources) or reserved.has_reserved_name(text)

    def finish(self, conversation: Any, prompt: Any, images: list[Any]) -> tuple[Any, Any]:
        """The conversation and the prompt, with token ids where its text needs care.

        Raises RuntimeError if an image got lost in the template.
        """
        if not self.needs_ids(prompt):
            return conversation, prompt
        text = prompt["prompt"]
        tokenizer = self._renderer.get_tokenizer()
        ids, order = reserved.encode(
            self._marks.split(text), lambda piece: tokenizer.encode(piece, add_special_tokens=False)
        )
        if sorted(order) != list(range(len(images))):
            raise RuntimeError(f"the chat template placed images {order} of {len(images)}")
        prompt = {**prompt, "prompt": self._marks.reveal(text), "prompt_token_ids": ids}
        if images:
            prompt["multi_modal_data"] = {"image": [images[i] for i in order]}
            prompt["multi_modal_uuids"] = {"image": [self.sources[i].uuid for i in order]}
        return self._marks.reveal(conversation), prompt


def image_limit(model_config: Any) -> int:
    """Images allowed in one request, from `--limit-mm-per-prompt`."""
    multimodal = model_config.multimodal_config
    return 0 if multimodal is None else multimodal.get_limit_per_prompt("image")


def _with_plain_arguments(message: Any) -> Any:
    """The message with tool-call arguments decoded, where escapes could hide a reserved name."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if calls is None:
        return message
    return {**message, "tool_calls": [_with_decoded_arguments(call) for call in calls]}


def _with_decoded_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str) or "\\u" not in arguments:
        return call
    try:
        decoded = json.loads(arguments)
    except json.JSONDecodeError:
        return call  # vLLM has its own answer to that
    if not isinstance(decoded, dict):
        return call
    return {**call, "function": {**function, "arguments": decoded}}


def _warn_of_images_in_text(chat: Chat) -> None:
    global _warned_image_in_text
    if _warned_image_in_text:
        return
    for message in chat.messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str) and _IMAGE_IN_TEXT.search(content):
            _warned_image_in_text = True
            logger.warning(
                "[vision-exp] a message holds a data:image/ URI as text: the model reads it as "
                "text, not as an image. Send it as an image_url part. (Said once.)"
            )
            return
