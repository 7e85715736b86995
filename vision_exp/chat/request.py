"""One chat on its way through the renderer: text for vLLM, images and token ids put back after."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

from vision_exp import settings
from vision_exp.chat import as_text, reserved
from vision_exp.chat.images import Unreadable, source_of
from vision_exp.chat.rules import UNREADABLE_NOTE, Policy, read_chat

logger = logging.getLogger("vllm.vision_exp")


def read_policy(limit: int | None = None) -> Policy:
    """The policy that the settings ask for. Raises ValueError naming a wrong value."""
    overflow, unreadable = settings.IMAGE_OVERFLOW.value(), settings.UNREADABLE_IMAGES.value()
    return Policy(settings.TOOL_IMAGES.value(), overflow, limit, unreadable)


class ChatRequest:
    """One chat: `messages` and `params` are for vLLM, text only; `sources` are its images.

    `renderer`: vLLM's BaseRenderer; `params`: its ChatParams. Raises RuleError for what the client
    has to change.
    """

    def __init__(self, renderer: Any, messages: Sequence[Any], params: Any) -> None:
        self._renderer = renderer
        self._escaper = reserved.ReservedTokenEscaper()
        policy = read_policy(image_limit(renderer.model_config))
        chat = read_chat(messages, policy, self._escaper.image)
        self.unreadable = policy.unreadable
        self.sources = [source_of(image, policy.unreadable) for image in chat.images]
        as_text.warn(chat.messages, vars(renderer).setdefault("vision_exp_warned", set()))
        self.messages = self._escaper.escape([_with_plain_arguments(m) for m in chat.messages])
        # Marks are for strings: the template must not tokenise.
        template = {**self._escaper.escape(params.chat_template_kwargs), "tokenize": False}
        self.params = dataclasses.replace(params, chat_template_kwargs=template)

    def connector(self) -> Any:
        """vLLM's loader of images, with this request's options; None if there is none to load."""
        if not self.sources:
            return None
        import vllm.envs as envs
        from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

        from vision_exp.chat.loading import ImageLoader

        config = self._renderer.model_config
        options = self.params.media_io_kwargs or config.multimodal_config.media_io_kwargs
        connector = MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR,
            media_io_kwargs=options,
            allowed_local_media_path=config.allowed_local_media_path,
            allowed_media_domains=config.allowed_media_domains,
        )
        return ImageLoader(connector)

    def leave_out(self, images: Sequence[Any]) -> None:
        """Put a text note where an image is Unreadable."""
        lost = {index for index, image in enumerate(images) if isinstance(image, Unreadable)}
        for index in lost:
            logger.info("[vision-exp] an earlier image is left out: %s", images[index].reason)
        if lost:
            self.messages = self._escaper.note(self.messages, lost, UNREADABLE_NOTE)

    def needs_ids(self, prompt: Any) -> bool:
        """False if vLLM's own tokenisation of the rendered text is right."""
        if "prompt" not in prompt:
            raise RuntimeError("the chat template gave no text, so images cannot be placed in it")
        text = self._escaper.unescape(prompt["prompt"])
        return bool(self.sources) or reserved.has_reserved_name(text)

    def finish(self, conversation: Any, prompt: Any, images: list[Any]) -> tuple[Any, Any]:
        """The conversation and the prompt, with token ids where its text needs care.

        `images`: as loaded, those that were left out among them. Raises RuntimeError if an image
        got lost in the template.
        """
        if not self.needs_ids(prompt):
            return conversation, prompt
        text = prompt["prompt"]
        tokenizer = self._renderer.get_tokenizer()
        ids, order = reserved.encode(
            self._escaper.split(text),
            lambda piece: tokenizer.encode(piece, add_special_tokens=False),
        )
        wanted = [i for i, image in enumerate(images) if not isinstance(image, Unreadable)]
        if sorted(order) != wanted:
            raise RuntimeError(f"the chat template placed images {order} of {len(images)}")
        prompt = {**prompt, "prompt": self._escaper.unescape(text), "prompt_token_ids": ids}
        if order:
            prompt["multi_modal_data"] = {"image": [images[i] for i in order]}
            prompt["multi_modal_uuids"] = {"image": [self.sources[i].uuid for i in order]}
        return self._escaper.unescape(conversation), prompt


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
