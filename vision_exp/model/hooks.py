"""What the model room wraps in vLLM: registry, caches of images, answers, model and draft.

vLLM's class `DeepseekV4ForCausalLM` serves text-only checkpoints too, so its attributes stay stock.
For the config of a Vision-Exp checkpoint the registry answers with a subclass and with a model info
that says "multimodal"; for every other config it answers what it always did. The `modelinfos` disk
cache holds the stock answer in both cases and cannot go stale.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from types import ModuleType
from typing import Any

import torch

from vision_exp import patching
from vision_exp.config import is_vision_exp
from vision_exp.engine import intake
from vision_exp.engine.failures import client
from vision_exp.install import activate
from vision_exp.model import ranks, registry, selftest
from vision_exp.model.model import VisionExpMixin, add_vision, vision_class
from vision_exp.routing import support as routing
from vision_exp.visibility import support as visibility

# What this room needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.config.model:ModelConfig.{is_mm_prefix_lm, hf_config, multimodal_config}",
    "vllm.config.multimodal:MultiModalConfig.{get_limit_per_prompt(modality), mm_encoder_tp_mode}",
    "vllm.distributed.communication_op:tensor_model_parallel_all_gather(input_, dim)",
    "vllm.distributed.parallel_state:GroupCoordinator.{is_first_rank, cpu_group, world_size}",
    "vllm.distributed.parallel_state:{get_tensor_model_parallel_rank, "
    "get_tensor_model_parallel_world_size, get_pp_group, get_tp_group, get_world_group}",
    "vllm.distributed.ec_transfer.ec_transfer_state:_EC_CONNECTOR_AGENT",
    "vllm.distributed.kv_transfer.kv_transfer_state:_KV_CONNECTOR_AGENT",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages",
    "vllm.entrypoints.offline_utils:OfflineInferenceMixin._run_engine",
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.responses_stream_generator",
    "vllm.exceptions:VLLMValidationError.__init__(message, parameter)",
    "vllm.model_executor.model_loader.weight_utils:default_weight_loader(param, loaded_weight)",
    "vllm.model_executor.models.interfaces:SupportsMultiModal.{_mark_tower_model(vllm_config, "
    "modalities), supports_multimodal, supports_encoder_tp_data, requires_raw_input_tokens, "
    "get_placeholder_str(modality, i), get_language_model, embed_multimodal(**), "
    "embed_input_ids(input_ids, multimodal_embeddings, is_multimodal)}",
    "vllm.model_executor.models.registry:_ModelInfo.{supports_multimodal, "
    "requires_raw_input_tokens, supports_multimodal_encoder_tp_data}",
    "vllm.model_executor.models.registry:_ModelRegistry.{inspect_model_cls(architectures, "
    "model_config), resolve_model_cls(architectures, model_config)}",
    "vllm.model_executor.models.vision:get_load_balance_assignment(sizes, num_gpus)",
    "vllm.models.deepseek_v4.amd.model:DeepseekV4ForCausalLM.{__init__(vllm_config, prefix), "
    "embed_input_ids(input_ids), load_weights(weights), config, model}",
    "vllm.models.deepseek_v4.amd.model:DeepseekV4Model.layers",
    "vllm.models.deepseek_v4.amd.mtp:DeepSeekV4MTP.embed_input_ids(input_ids)",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4DecoderLayer.ffn",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4ForCausalLM.{__init__(vllm_config, prefix), "
    "embed_input_ids(input_ids), load_weights(weights), config, model}",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4Model.layers",
    "vllm.models.deepseek_v4.nvidia.mtp:DeepSeekV4MTP.embed_input_ids(input_ids)",
    "vllm.multimodal.inputs:{MultiModalFeatureSpec, PlaceholderRange}",
    "vllm.multimodal.inputs:MultiModalFieldConfig.{batched(modality, keep_on_cpu), "
    "flat_from_sizes(modality, size_per_item)}",
    "vllm.multimodal.parse:ImageProcessorItems.{get_all, __init__, get, get_item_for_hash(index)}",
    "vllm.multimodal.parse:MultiModalDataItems",
    "vllm.multimodal.parse:MultiModalDataParser.{__init__, _parse_image_data(data)}",
    "vllm.multimodal.processing.context:BaseProcessingInfo.{allowed_mm_limits, ctx, "
    "get_mm_max_tokens_per_item(seq_len, mm_counts), get_data_parser, get_supported_mm_limits, "
    "get_tokenizer, model_id, parse_mm_data(mm_data, validate), validate_num_items(modality, "
    "num_items)}",
    "vllm.multimodal.processing.dummy_inputs:BaseDummyInputsBuilder.{get_dummy_text(mm_counts), "
    "get_dummy_mm_data(seq_len, mm_counts, mm_options), get_dummy_processor_inputs(seq_len, "
    "mm_counts, mm_options), _get_dummy_images(width, height, num_images, overrides)}",
    "vllm.multimodal.processing.inputs:ProcessorInputs.{prompt, mm_data_items, mm_uuid_items}",
    "vllm.multimodal.processing.processor:BaseMultiModalProcessor.{__init__(info, dummy_inputs), "
    "apply(inputs), _apply_hf_processor_main(mm_items), _get_mm_fields_config(hf_inputs, "
    "hf_processor_mm_kwargs), _get_prompt_updates(mm_items, hf_processor_mm_kwargs, "
    "out_mm_kwargs), _apply_prompt_updates(token_ids, mm_prompt_updates)}",
    "vllm.multimodal.processing.processor:PlaceholderFeaturesInfo.{modality, item_idx, start_idx, "
    "tokens, is_embed}",
    "vllm.multimodal.processing.processor:PromptReplacement.{modality, target, replacement}",
    "vllm.multimodal.processing.processor:PromptUpdateDetails.{full, select_token_id(seq, "
    "embed_token_id)}",
    "vllm.multimodal.processing:{BaseDummyInputsBuilder, BaseMultiModalProcessor, "
    "BaseProcessingInfo, ProcessorInputs, PromptReplacement, PromptUpdateDetails}",
    "vllm.multimodal.registry:MultiModalRegistry.{register_processor(processor, info, "
    "dummy_inputs), processor_cache_from_config(vllm_config), "
    "processor_only_cache_from_config(vllm_config)}",
    "vllm.multimodal:MULTIMODAL_REGISTRY",
    "vllm.renderers.base:BaseRenderer.mm_processor_cache",
    "vllm.v1.engine.async_llm:AsyncLLM.{__init__, renderer, engine_core}",
    "vllm.v1.engine.core_client:AsyncMPClient._send_input(request_type, request, engine)",
    "vllm.v1.engine.core_client:InprocClient.add_request(request)",
    "vllm.v1.engine.core_client:MPClient.encoder",
    "vllm.v1.engine.core_client:SyncMPClient._send_input(request_type, request)",
    "vllm.v1.engine.llm_engine:LLMEngine.{__init__, renderer, engine_core, vllm_config}",
    "vllm.sampling_params:SamplingParams",
    "vllm.v1.core.sched.output:NewRequestData.{prompt_token_ids, sampling_params, pooling_params, "
    "block_ids, lora_request, prefill_token_ids}",
    "vllm.v1.core.sched.output:SchedulerOutput.{make_empty, total_num_scheduled_tokens, "
    "num_common_prefix_blocks}",
    "vllm.v1.kv_cache_interface:KVCacheConfig.{kv_cache_groups, num_blocks}",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.{get_model, kv_connector, speculator, "
    "kv_cache_config}",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.{get_model, drafter, kv_cache_config}",
    "vllm.v1.worker.gpu_worker:Worker.{compile_or_warm_up_model, execute_model(scheduler_output), "
    "sample_tokens(grammar_output), model_runner}",
)


def install() -> None:
    """Wrap what vLLM asks about a checkpoint before it builds a model. Imports nothing of vLLM."""
    patching.when_imported("vllm.model_executor.models.registry", _wrap_registry)
    patching.when_imported("vllm.config.model", _wrap_model_config)
    patching.when_imported("vllm.multimodal.registry", _wrap_caches)
    patching.when_imported("vllm.v1.engine.core_client", _wrap_core_clients)
    patching.when_imported("vllm.v1.engine.llm_engine", _wrap_offline_client)
    patching.when_imported("vllm.v1.engine.async_llm", _wrap_server_client)
    patching.when_imported("vllm.entrypoints.offline_utils", _wrap_offline)
    patching.when_imported("vllm.entrypoints.openai.responses.serving", _wrap_responses)
    patching.when_imported("vllm.entrypoints.anthropic.serving", _wrap_anthropic)
    patching.when_imported("vllm.v1.worker.gpu_worker", _wrap_worker)


def install_model(namespace: dict[str, Any]) -> None:
    """Wrap the constructor in vLLM's patched model.py, for models built directly too."""
    patching.wrap(namespace["DeepseekV4ForCausalLM"], "__init__", _init)


def install_draft(site: str, namespace: dict[str, Any]) -> None:
    """Let the MTP draft take the keywords that speculators pass for a multimodal target."""
    if site == "mtp":
        patching.wrap(namespace["DeepSeekV4MTP"], "embed_input_ids", _draft_embed_input_ids)


def _wrap_registry(module: ModuleType) -> None:
    patching.wrap(module._ModelRegistry, "inspect_model_cls", _inspect_model_cls)
    patching.wrap(module._ModelRegistry, "resolve_model_cls", _resolve_model_cls)


def _wrap_model_config(module: ModuleType) -> None:
    # A property up to 0.24, then a cached one.
    patching.wrap(module.ModelConfig, "is_mm_prefix_lm", _is_mm_prefix_lm)


def _wrap_worker(module: ModuleType) -> None:
    patching.wrap(module.Worker, "compile_or_warm_up_model", _warm_up)


def _warm_up(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    if is_vision_exp(worker.vllm_config.model_config.hf_config):
        selftest.run(worker)
    return original(worker, *args, **kwargs)


def _is_mm_prefix_lm(original: Any, self: Any) -> bool:
    # Text mode is no prefix-LM; before 0.27 vLLM does not see that itself.
    return original(self) and not registry.images_off(self)


def _inspect_model_cls(original: Any, self: Any, architectures: Any, model_config: Any) -> Any:
    info, architecture = original(self, architectures, model_config)
    if registry.is_ours(architecture, model_config):
        info = registry.multimodal_info(info, model_config)
    return info, architecture


def _resolve_model_cls(original: Any, self: Any, architectures: Any, model_config: Any) -> Any:
    model_class, architecture = original(self, architectures, model_config)
    if registry.is_ours(architecture, model_config):
        model_class = vision_class(model_class)
    return model_class, architecture


# --- images between the front end and the engine --------------------------------------------------


def _wrap_caches(module: ModuleType) -> None:
    registry = module.MultiModalRegistry
    patching.wrap(registry, "processor_only_cache_from_config", _prepared_images)
    patching.wrap(registry, "processor_cache_from_config", _images)


def _prepared_images(original: Callable[..., Any], registry: Any, vllm_config: Any) -> Any:
    cache = original(registry, vllm_config)
    if cache is None or not is_vision_exp(vllm_config.model_config.hf_config):
        return cache
    return intake.ImageCache(cache)


def _images(original: Callable[..., Any], registry: Any, vllm_config: Any) -> Any:
    cache = original(registry, vllm_config)
    if cache is None or not is_vision_exp(vllm_config.model_config.hf_config):
        return cache
    images = registry.processor_only_cache_from_config(vllm_config)
    if type(cache) is not type(images.prepared):
        images.sender = cache
    return images


def _wrap_core_clients(module: ModuleType) -> None:
    patching.wrap(module.InprocClient, "add_request", _add_request)
    patching.wrap(module.SyncMPClient, "_send_input", _send_input)
    patching.wrap(module.AsyncMPClient, "_send_input", _send_input)


def _add_request(original: Callable[..., Any], core: Any, request: Any) -> Any:
    return original(core, intake.for_engine(core, request))


def _send_input(
    original: Callable[..., Any], core: Any, kind: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    return original(core, kind, intake.for_engine(core, request), *args, **kwargs)


def _wrap_offline_client(module: ModuleType) -> None:
    patching.wrap(module.LLMEngine, "__init__", _client_init)


def _wrap_server_client(module: ModuleType) -> None:
    patching.wrap(module.AsyncLLM, "__init__", _client_init)


def _client_init(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> None:
    original(engine, *args, **kwargs)
    intake.connect(engine.engine_core, engine.renderer.mm_processor_cache)


# --- answers --------------------------------------------------------------------------------------


def _wrap_offline(module: ModuleType) -> None:
    patching.wrap(module.OfflineInferenceMixin, "_run_engine", _run_engine)


def _run_engine(original: Callable[..., Any], llm: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = original(llm, *args, **kwargs)
    if is_vision_exp(llm.llm_engine.vllm_config.model_config.hf_config):
        client.check_batch(outputs)
    return outputs


def _wrap_responses(module: ModuleType) -> None:
    responses = module.OpenAIServingResponses
    patching.wrap(responses, "responses_stream_generator", _responses_stream)
    patching.add_method(responses, _CONVERT, _raise_again)


def _wrap_anthropic(module: ModuleType) -> None:
    anthropic = module.AnthropicServingMessages
    patching.add_method(anthropic, _CONVERT, _raise_again)


def _responses_stream(
    original: Callable[..., Any], serving: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[Any, None]:
    events = original(serving, *args, **kwargs)
    return (
        client.end_with_error(events) if is_vision_exp(serving.model_config.hf_config) else events
    )


#: Of vLLM's base class: what a stream makes of an error, where that is none of its API's events.
_CONVERT = "_convert_generation_error_to_streaming_response"


def _raise_again(serving: Any, error: Exception) -> Any:
    if is_vision_exp(serving.model_config.hf_config):
        raise error
    inherited = (vars(base).get(_CONVERT) for base in type(serving).__mro__)
    original: Any = next(one for one in inherited if one not in (None, _raise_again))
    return original(serving, error)


# --- model ----------------------------------------------------------------------------------------


def _draft_embed_input_ids(
    original: Any, self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    routing.refuse_embeddings(kwargs)
    # The draft sees images through the target's hidden states, not through its own embeddings.
    return original(self, input_ids)


def _init(original: Any, self: Any, *, vllm_config: Any, prefix: str = "") -> None:
    if not is_vision_exp(vllm_config.model_config.hf_config):
        if isinstance(self, VisionExpMixin):
            # vLLM caches the class by model path; this config was overridden to text-only.
            object.__setattr__(self, "__class__", type(self).text_class)
        original(self, vllm_config=vllm_config, prefix=prefix)
        return
    activate()
    ranks.check(vllm_config)
    visibility.describe(vllm_config)  # refuses where visibility is demanded, before weights load
    visibility.check_drafting(vllm_config)
    text_class: Any = type(self)
    object.__setattr__(self, "__class__", vision_class(text_class))
    original(self, vllm_config=vllm_config, prefix=prefix)
    add_vision(self, vllm_config)
