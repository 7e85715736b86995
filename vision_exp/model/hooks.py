"""What the model room wraps in vLLM: the registry's answers, the model's constructor, its draft.

vLLM's class `DeepseekV4ForCausalLM` serves text-only checkpoints too, so its attributes stay stock.
For the config of a Vision-Exp checkpoint the registry answers with a subclass and with a model info
that says "multimodal"; for every other config it answers what it always did. The `modelinfos` disk
cache holds the stock answer in both cases and cannot go stale.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from vision_exp import evidence, patching
from vision_exp.config import is_vision_exp
from vision_exp.install import activate
from vision_exp.model import ranks, registry
from vision_exp.model.model import VisionExpMixin, add_vision, vision_class
from vision_exp.routing import support as routing
from vision_exp.visibility import support as visibility

# What this room needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.config.model:ModelConfig.is_mm_prefix_lm",
    "vllm.config.model:ModelConfig.hf_config",
    "vllm.config.model:ModelConfig.multimodal_config",
    "vllm.config.multimodal:MultiModalConfig.get_limit_per_prompt(modality)",
    "vllm.config.multimodal:MultiModalConfig.mm_encoder_tp_mode",
    "vllm.distributed.communication_op:tensor_model_parallel_all_gather(input_, dim)",
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank",
    "vllm.distributed.parallel_state:get_tensor_model_parallel_world_size",
    "vllm.distributed.parallel_state:get_pp_group",
    "vllm.distributed.parallel_state:GroupCoordinator.is_first_rank",
    "vllm.distributed.parallel_state:get_tp_group",
    "vllm.distributed.parallel_state:GroupCoordinator.cpu_group",
    "vllm.distributed.parallel_state:GroupCoordinator.world_size",
    "vllm.exceptions:VLLMValidationError.__init__(message, parameter)",
    "vllm.model_executor.model_loader.weight_utils:default_weight_loader(param, loaded_weight)",
    "vllm.model_executor.models.interfaces:"
    "SupportsMultiModal._mark_tower_model(vllm_config, modalities)",
    "vllm.model_executor.models.interfaces:SupportsMultiModal.supports_multimodal",
    "vllm.model_executor.models.interfaces:SupportsMultiModal.supports_encoder_tp_data",
    "vllm.model_executor.models.interfaces:SupportsMultiModal.requires_raw_input_tokens",
    "vllm.model_executor.models.interfaces:SupportsMultiModal.get_placeholder_str(modality, i)",
    "vllm.model_executor.models.interfaces:SupportsMultiModal.get_language_model",
    "vllm.model_executor.models.interfaces:SupportsMultiModal.embed_multimodal(**)",
    "vllm.model_executor.models.interfaces:"
    "SupportsMultiModal.embed_input_ids(input_ids, multimodal_embeddings, is_multimodal)",
    "vllm.model_executor.models.registry:"
    "_ModelRegistry.inspect_model_cls(architectures, model_config)",
    "vllm.model_executor.models.registry:"
    "_ModelRegistry.resolve_model_cls(architectures, model_config)",
    "vllm.model_executor.models.registry:_ModelInfo.supports_multimodal",
    "vllm.model_executor.models.registry:_ModelInfo.requires_raw_input_tokens",
    "vllm.model_executor.models.registry:_ModelInfo.supports_multimodal_encoder_tp_data",
    "vllm.model_executor.models.vision:get_load_balance_assignment(sizes, num_gpus)",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4ForCausalLM.__init__(vllm_config, prefix)",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4ForCausalLM.embed_input_ids(input_ids)",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4ForCausalLM.load_weights(weights)",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4ForCausalLM.config",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4ForCausalLM.model",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4Model.layers",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4DecoderLayer.ffn",
    "vllm.models.deepseek_v4.nvidia.mtp:DeepSeekV4MTP.embed_input_ids(input_ids)",
    "vllm.multimodal:MULTIMODAL_REGISTRY",
    "vllm.multimodal.inputs:MultiModalFieldConfig.batched(modality, keep_on_cpu)",
    "vllm.multimodal.inputs:MultiModalFieldConfig.flat_from_sizes(modality, size_per_item)",
    "vllm.multimodal.parse:ImageProcessorItems.get_all",
    "vllm.multimodal.parse:MultiModalDataItems",
    "vllm.multimodal.parse:ImageProcessorItems.__init__",
    "vllm.multimodal.parse:ImageProcessorItems.get",
    "vllm.multimodal.parse:ImageProcessorItems.get_item_for_hash(index)",
    "vllm.multimodal.parse:MultiModalDataParser.__init__",
    "vllm.multimodal.parse:MultiModalDataParser._parse_image_data(data)",
    "vllm.multimodal.processing:BaseDummyInputsBuilder",
    "vllm.multimodal.processing:BaseMultiModalProcessor",
    "vllm.multimodal.processing:BaseProcessingInfo",
    "vllm.multimodal.processing:ProcessorInputs",
    "vllm.multimodal.processing:PromptReplacement",
    "vllm.multimodal.processing:PromptUpdateDetails",
    "vllm.multimodal.processing.context:BaseProcessingInfo.allowed_mm_limits",
    "vllm.multimodal.processing.context:BaseProcessingInfo.ctx",
    "vllm.multimodal.processing.context:"
    "BaseProcessingInfo.get_mm_max_tokens_per_item(seq_len, mm_counts)",
    "vllm.multimodal.processing.context:BaseProcessingInfo.get_data_parser",
    "vllm.multimodal.processing.context:BaseProcessingInfo.get_supported_mm_limits",
    "vllm.multimodal.processing.context:BaseProcessingInfo.get_tokenizer",
    "vllm.multimodal.processing.context:BaseProcessingInfo.model_id",
    "vllm.multimodal.processing.context:BaseProcessingInfo.parse_mm_data(mm_data, validate)",
    "vllm.multimodal.processing.context:BaseProcessingInfo.validate_num_items(modality, num_items)",
    "vllm.multimodal.processing.dummy_inputs:BaseDummyInputsBuilder.get_dummy_text(mm_counts)",
    "vllm.multimodal.processing.dummy_inputs:"
    "BaseDummyInputsBuilder.get_dummy_mm_data(seq_len, mm_counts, mm_options)",
    "vllm.multimodal.processing.dummy_inputs:"
    "BaseDummyInputsBuilder.get_dummy_processor_inputs(seq_len, mm_counts, mm_options)",
    "vllm.multimodal.processing.dummy_inputs:"
    "BaseDummyInputsBuilder._get_dummy_images(width, height, num_images, overrides)",
    "vllm.multimodal.processing.inputs:ProcessorInputs.prompt",
    "vllm.multimodal.processing.inputs:ProcessorInputs.mm_data_items",
    "vllm.multimodal.processing.inputs:ProcessorInputs.mm_uuid_items",
    "vllm.multimodal.processing.processor:BaseMultiModalProcessor.__init__(info, dummy_inputs)",
    "vllm.multimodal.processing.processor:BaseMultiModalProcessor.apply(inputs)",
    "vllm.multimodal.processing.processor:"
    "BaseMultiModalProcessor._apply_hf_processor_main(mm_items)",
    "vllm.multimodal.processing.processor:"
    "BaseMultiModalProcessor._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)",
    "vllm.multimodal.processing.processor:"
    "BaseMultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
    "vllm.multimodal.processing.processor:"
    "BaseMultiModalProcessor._apply_prompt_updates(token_ids, mm_prompt_updates)",
    "vllm.multimodal.processing.processor:PromptReplacement.modality",
    "vllm.multimodal.processing.processor:PromptReplacement.target",
    "vllm.multimodal.processing.processor:PromptReplacement.replacement",
    "vllm.multimodal.processing.processor:PromptUpdateDetails.full",
    "vllm.multimodal.processing.processor:PromptUpdateDetails.select_token_id(seq, embed_token_id)",
    "vllm.multimodal.processing.processor:PlaceholderFeaturesInfo.modality",
    "vllm.multimodal.processing.processor:PlaceholderFeaturesInfo.item_idx",
    "vllm.multimodal.processing.processor:PlaceholderFeaturesInfo.start_idx",
    "vllm.multimodal.processing.processor:PlaceholderFeaturesInfo.tokens",
    "vllm.multimodal.processing.processor:PlaceholderFeaturesInfo.is_embed",
    "vllm.multimodal.registry:MultiModalRegistry.register_processor(processor, info, dummy_inputs)",
)


def install() -> None:
    """Wrap what vLLM asks about a checkpoint before it builds a model. Imports nothing of vLLM."""
    patching.when_imported("vllm.model_executor.models.registry", _wrap_registry)
    patching.when_imported("vllm.config.model", _wrap_model_config)


def install_model(namespace: dict[str, Any]) -> None:
    """Wrap the constructor in vLLM's patched nvidia/model.py, for models built directly too."""
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
    ranks.check()
    text_class: Any = type(self)
    object.__setattr__(self, "__class__", vision_class(text_class))
    original(self, vllm_config=vllm_config, prefix=prefix)
    add_vision(self, vllm_config)
    evidence.log_once(
        "model",
        vllm_config.model_config,
        routing=routing.RULE,
        visibility=visibility.describe(vllm_config),
    )
