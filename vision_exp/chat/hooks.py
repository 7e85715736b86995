"""Wraps what a request passes before the engine computes it, for vision checkpoints only.

Chats: Chat Completions, Responses, Anthropic messages and `LLM.chat` all go through the
DeepSeek-V4 renderer's `render_messages`. The wrapper takes the image parts out, lets vLLM render
text, and puts one placeholder token per image where its part stood (see request.py); the
multimodal processor expands those.

Prompts: three places that every prompt passes refuse reserved token ids (see prompts.py). The
renderer, before anything is processed: an error there is an HTTP status even for streams. The API
server's input processor, which also gets what another server rendered. The engine's preprocessing,
where cached image data is back: an error there ends that one request.

Errors: before 0.28 vLLM's Anthropic endpoint answers every error with 500; a refused chat is a 400.
None repeats an image (see front.py, which stands before all endpoints). Of a batch, they say which
member is meant.

Prefill and decode: what a prefill server made of a chat comes with the chat itself to the decode
server. From 0.27 on vLLM would take the ids and drop the images (see prompts.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from vision_exp import patching
from vision_exp.chat import anthropic, front, images, prompts
from vision_exp.chat.prompts import bad_request
from vision_exp.chat.request import ChatRequest, read_policy
from vision_exp.chat.rules import RuleError
from vision_exp.config import is_vision_exp

# What this room needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.config.model:ModelConfig.{allowed_local_media_path, allowed_media_domains}",
    "vllm.config.multimodal:MultiModalConfig.{get_limit_per_prompt(modality), media_io_kwargs}",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.{create_messages, count_tokens}",
    "vllm.entrypoints.openai.responses.utils:_construct_message_from_response_item(item)",
    "vllm.entrypoints.serve.engine.serving:"
    "BaseServing.create_error_response(message) | vllm.entrypoints.openai.engine.serving:"
    "OpenAIServing.create_error_response(message)",
    "vllm.entrypoints.serve.engine.serving:"
    "BaseServing.model_config | vllm.entrypoints.openai.engine.serving:OpenAIServing.model_config",
    "vllm.entrypoints.offline_utils:OfflineInferenceMixin._render_and_add_requests(prompts, "
    "params)",
    "vllm.entrypoints.serve.sagemaker.api_router:attach_router(app, supported_tasks, model_config) "
    "since 0.24",
    "vllm.envs:{VLLM_MEDIA_CONNECTOR, VLLM_IMAGE_FETCH_TIMEOUT}",
    "vllm.exceptions:VLLMValidationError",
    "vllm.inputs.llm:TokensPrompt.{prompt_token_ids, prompt}",
    "vllm.inputs.llm:_PromptOptions.{multi_modal_data, multi_modal_uuids}",
    "vllm.multimodal.inputs:MultiModalFeatureSpec.{data, mm_position, modality}",
    "vllm.multimodal.inputs:MultiModalFieldElem.data",
    "vllm.multimodal.inputs:PlaceholderRange.{offset, length, is_embed}",
    "vllm.multimodal.media.connector:MediaConnector.{__init__(media_io_kwargs, "
    "allowed_local_media_path, allowed_media_domains), fetch_image(image_url), "
    "fetch_image_async(image_url), media_io_kwargs, load_from_url(url, media_io, fetch_timeout), "
    "load_from_url_async(url, media_io, fetch_timeout)}",
    "vllm.multimodal.media.image:ImageMediaIO.{__init__(image_mode), load_bytes(data), "
    "rgba_background_color, _convert_image_mode(image)}",
    "vllm.multimodal.media:{MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaWithBytes}",
    "vllm.renderers.base:BaseRenderer.{__init__, _executor, default_chat_tok_params, "
    "get_tokenizer, model_config, process_for_engine(prompt), process_for_engine_async(prompt)}",
    "vllm.renderers.deepseek_v4:DeepseekV4Renderer.{render_messages(messages, params), "
    "render_messages_async(messages, params)}",
    "vllm.renderers.online_renderer:OnlineRenderer.{preprocess_chat(request, messages), "
    "model_config} since 0.27",
    "vllm.renderers.params:ChatParams.{chat_template_kwargs, media_io_kwargs}",
    "vllm.renderers.params:TokenizeParams.add_special_tokens",
    "vllm.utils.registry:ExtensionManager.load(cls_name, **)",
    "vllm.v1.engine.core:EngineCore.{preprocess_add_request(request), vllm_config}",
    "vllm.v1.engine:EngineCoreRequest.{prompt_token_ids, mm_features, sampling_params}",
)

RUST_VARIABLE = "VLLM_USE_RUST_FRONTEND"


def install() -> None:
    """Wrap every place above once it is imported.

    Raises RuntimeError under the Rust front end, ValueError for a wrong setting: a process that
    sees a vision checkpoint must not start with either.
    """
    if os.environ.get(RUST_VARIABLE, "0").strip().lower() not in ("", "0", "false"):
        raise RuntimeError(
            f"{RUST_VARIABLE}=1 renders chats outside Python, where images cannot be handled: "
            f"unset {RUST_VARIABLE} to serve this vision checkpoint"
        )
    read_policy()
    patching.when_imported("vllm.renderers.base", _wrap_base_renderer)
    patching.when_imported("vllm.renderers.deepseek_v4", _wrap_renderer)
    patching.when_imported("vllm.v1.engine.core", _wrap_engine_core)
    patching.when_imported("vllm.entrypoints.anthropic.serving", _wrap_anthropic)
    patching.when_imported("vllm.entrypoints.offline_utils", _wrap_offline)
    patching.when_imported("vllm.entrypoints.openai.responses.utils", _wrap_items)
    patching.when_imported("vllm.renderers.online_renderer", _wrap_online_renderer)
    patching.when_imported("vllm.entrypoints.serve.sagemaker.api_router", _wrap_routes)


def _wrap_base_renderer(module: ModuleType) -> None:
    patching.wrap(module.BaseRenderer, "__init__", _init)
    patching.wrap(module.BaseRenderer, "process_for_engine", _process_for_engine)
    patching.wrap(module.BaseRenderer, "process_for_engine_async", _process_for_engine_async)


def _wrap_renderer(module: ModuleType) -> None:
    patching.wrap(module.DeepseekV4Renderer, "render_messages", _render_messages)
    patching.wrap(module.DeepseekV4Renderer, "render_messages_async", _render_messages_async)


def _wrap_engine_core(module: ModuleType) -> None:
    patching.wrap(module.EngineCore, "preprocess_add_request", _preprocess_add_request)


def _wrap_anthropic(module: ModuleType) -> None:
    patching.wrap(module.AnthropicServingMessages, "create_messages", _answer_client_errors)
    patching.wrap(module.AnthropicServingMessages, "count_tokens", _answer_client_errors)


def _wrap_offline(module: ModuleType) -> None:
    patching.wrap(module.OfflineInferenceMixin, "_render_and_add_requests", _add_requests)


def _wrap_items(module: ModuleType) -> None:
    patching.wrap(module, "_construct_message_from_response_item", _message_of_item)


def _wrap_online_renderer(module: ModuleType) -> None:
    if hasattr(module, "_reused_prompt_token_ids"):  # from 0.27 on
        patching.wrap(module.OnlineRenderer, "preprocess_chat", _preprocess_chat)


def _wrap_routes(module: ModuleType) -> None:
    # One of those that every build of the server's application calls, with its model.
    patching.wrap(module, "attach_router", _attach_router)


def _is_vision(holder: Any) -> bool:
    """True if a renderer or an endpoint serves a Vision-Exp checkpoint."""
    return is_vision_exp(getattr(holder.model_config, "hf_config", None))


def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if not _is_vision(self):
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


@contextlib.contextmanager
def _client_errors() -> Iterator[None]:
    try:
        yield
    except RuleError as error:
        raise bad_request(str(error)) from error


def _render_messages(original: Any, self: Any, messages: Any, params: Any) -> Any:
    if not _is_vision(self):
        return original(self, messages, params)
    with _client_errors():
        request = ChatRequest(self, messages, params)
        loaded = images.load(request.sources, request.connector(), request.unreadable)
        request.leave_out(loaded)
    conversation, prompt = original(self, request.messages, request.params)
    return request.finish(conversation, prompt, loaded)


async def _render_messages_async(original: Any, self: Any, messages: Any, params: Any) -> Any:
    if not _is_vision(self):
        return await original(self, messages, params)
    with _client_errors():
        request = ChatRequest(self, messages, params)
        loader = request.connector()
        loaded = await images.load_async(request.sources, loader, request.unreadable)
        request.leave_out(loaded)
    conversation, prompt = await original(self, request.messages, request.params)
    if not request.needs_ids(prompt):
        return conversation, prompt
    # Tokenising blocks, so it belongs on the renderer's pool, where vLLM does its own.
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._executor, request.finish, conversation, prompt, loaded)


def _process_for_engine(original: Any, self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
    if _is_vision(self):
        prompts.check_prompt(prompt)
    return original(self, prompt, *args, **kwargs)


async def _process_for_engine_async(
    original: Any, self: Any, prompt: Any, *args: Any, **kwargs: Any
) -> Any:
    if _is_vision(self):
        prompts.check_prompt(prompt)
    return await original(self, prompt, *args, **kwargs)


def _preprocess_add_request(original: Any, self: Any, request: Any) -> Any:
    hf_config = self.vllm_config.model_config.hf_config
    if not request.mm_features or not is_vision_exp(hf_config):
        return original(self, request)
    prompts.restore_is_embed(request)
    done = original(self, request)  # fills in image data that the API server knew to be cached
    prompts.check_request(request, hf_config)
    return done


async def _answer_client_errors(
    original: Any, self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    from vllm.exceptions import VLLMValidationError

    try:
        if _is_vision(self):
            with _client_errors():
                anthropic.check_images(request)
        return await original(self, request, *args, **kwargs)
    except (ValueError, VLLMValidationError) as error:  # as the other endpoints do
        if not _is_vision(self):
            raise
        return self.create_error_response(error)


def _message_of_item(original: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
    message = original(item, *args, **kwargs)
    if message is None or isinstance(message, dict):
        return message
    # An object that vLLM knows nothing of: it would fail at the next item. See rules.read_chat.
    return {"type": getattr(message, "type", type(message).__name__)}


async def _preprocess_chat(
    original: Any, self: Any, request: Any, messages: Any, *args: Any, **kwargs: Any
) -> Any:
    with _client_errors():
        ids = prompts.take_ids(request, messages) if _is_vision(self) else None
    conversation, inputs = await original(self, request, messages, *args, **kwargs)
    if ids is not None:
        inputs = [prompts.replay(one, ids) for one in inputs]
    return conversation, inputs


def _add_requests(
    original: Any, self: Any, prompts: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    from vllm.exceptions import VLLMValidationError

    if not _is_vision(self) or len(params) < 2:
        return original(self, prompts, params, *args, **kwargs)
    done = 0

    def counted() -> Iterator[Any]:
        nonlocal done
        for prompt in prompts:
            yield prompt
            done += 1

    try:
        return original(self, counted(), params, *args, **kwargs)
    except VLLMValidationError as error:
        raise bad_request(f"item {done} of the {len(params)} (from 0): {error}") from error


def _attach_router(
    original: Any, app: Any, tasks: Any, model_config: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if is_vision_exp(getattr(model_config, "hf_config", None)):
        front.stand_before(app)
    return original(app, tasks, model_config, *args, **kwargs)
