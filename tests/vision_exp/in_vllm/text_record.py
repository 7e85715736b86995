"""Everything about a text-only checkpoint that an overlay could change, as JSON values.

Recorded in the stock tree and in the patched one, and compared by the parent.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import re
import types
from collections.abc import Callable
from typing import Any

import cpu_model
import torch
from PIL import Image
from rig_model import Rig

# Attributes by which vLLM decides at run time what a model can do.
CAPABILITIES = (
    "supports_multimodal",
    "supports_multimodal_embeddings",
    "supports_multimodal_raw_input_only",
    "supports_encoder_tp_data",
    "requires_raw_input_tokens",
    "get_language_model",
    "get_placeholder_str",
    "get_mm_mapping",
    "embed_multimodal",
    "mm_prefix_clamp_sliding_window",
    "_processor_factory",
    "vision",
    "aligner",
)


def record(rig: Rig) -> dict[str, Any]:
    return {
        **config_record(rig),
        **request_record(rig),
        **class_record(),
        **instance_record(rig),
        **foreign_record(),
    }


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error of a call, or "accepted"."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  the text is what is compared
        # Without what differs from run to run: addresses, and a set's order.
        text = re.sub(r"0x[0-9a-f]+|\{.*\}", "...", str(error), flags=re.DOTALL)
        return f"{type(error).__name__}: {text}"
    return "accepted"


def config_record(rig: Rig) -> dict[str, Any]:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    out: dict[str, Any] = {}
    for name, options in {
        "plain": {},
        "mm embeds": {"enable_mm_embeds": True},
        "no images": {"limit_mm_per_prompt": {"image": 0}},
        "data mode": {"mm_encoder_tp_mode": "data"},
    }.items():
        config = rig.model_config(rig.text_folder, **options)
        whole = VllmConfig(model_config=config)
        info, architecture = ModelRegistry.inspect_model_cls(config.architectures, config)
        out[f"config, {name}"] = {
            "multimodal_config": repr(config.multimodal_config),
            "is_multimodal_model": config.is_multimodal_model,
            "requires_raw_input_tokens": config.requires_raw_input_tokens,
            "is_mm_prefix_lm": config.is_mm_prefix_lm,
            "architecture": architecture,
            "info": dataclasses.asdict(info),
            "arch": {k: repr(v) for k, v in vars(config.model_arch_config).items()},
            "hash": config.compute_hash(),
            "hash of all": whole.compute_hash(),
            "hf_config": config.hf_config.to_dict(),
            "hf_config attributes": sorted(vars(config.hf_config)),
            "supports images": MULTIMODAL_REGISTRY.supports_multimodal_inputs(config),
            "processor": attempt(MULTIMODAL_REGISTRY.create_processor, config),
            "processor cache": repr(MULTIMODAL_REGISTRY.processor_cache_from_config(whole)),
            "chunked images": whole.scheduler_config.disable_chunked_mm_input,
            "batched tokens": whole.scheduler_config.max_num_batched_tokens,
        }
    return out


def request_record(rig: Rig) -> dict[str, Any]:
    from vllm.config import VllmConfig
    from vllm.renderers.params import ChatParams
    from vllm.renderers.registry import renderer_from_config

    renderer = renderer_from_config(VllmConfig(model_config=rig.text_model_config))
    image = Image.new("RGB", (30, 30))
    text = [{"role": "user", "content": "hello <｜deepseek_image｜> there"}]
    png = io.BytesIO()
    image.save(png, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
    (completion,) = renderer.render_cmpl([{"prompt": "a <｜deepseek_image｜> b"}])
    (ids,) = renderer.render_cmpl([{"prompt_token_ids": [5, 129264, 129259]}])
    _, chat = renderer.render_messages(text, ChatParams())
    return {
        "text prompt": completion["prompt_token_ids"],
        "raw ids": ids["prompt_token_ids"],
        "chat prompt": {key: repr(value) for key, value in chat.items() if key != "arrival_time"},
        "image in a completion": attempt(
            renderer.render_cmpl, [{"prompt": "x", "multi_modal_data": {"image": image}}]
        ),
        "image in a chat": attempt(renderer.render_messages, parts, ChatParams()),
        "special tokens in chats": renderer.default_chat_tok_params.add_special_tokens,
        "special tokens in completions": renderer.default_cmpl_tok_params.add_special_tokens,
    }


def class_record() -> dict[str, Any]:
    import vllm.models.deepseek_v4 as package
    import vllm.models.deepseek_v4.nvidia.model as model
    from vllm.transformers_utils.configs.deepseek_v4 import DeepseekV4Config

    classes = {
        one.__name__: one
        for one in (
            package.DeepseekV4ForCausalLM,
            package.DeepSeekV4MTP,
            *(
                [package.DSparkDeepseekV4ForCausalLM]
                if hasattr(package, "DSparkDeepseekV4ForCausalLM")  # from 0.25 on
                else []
            ),
            model.DeepseekV4Model,
            model.DeepseekV4MoE,
            model.DeepseekV4DecoderLayer,
        )
    }
    out: dict[str, Any] = {
        "bases": {
            name: [base.__qualname__ for base in one.__mro__] for name, one in classes.items()
        },
        "attributes": {name: sorted(dir(one)) for name, one in classes.items()},
        "functions": {
            name: {key: _code(value) for key, value in sorted(vars(one).items())}
            for name, one in classes.items()
        },
        "config attributes": sorted(
            # transformers adds __init_...__ names to a class when it first makes one.
            {name for name in dir(DeepseekV4Config) if not name.startswith("__")}
        ),
    }
    return out


def _code(value: Any) -> str:
    function = getattr(value, "__func__", value)
    if not isinstance(function, types.FunctionType):
        return type(value).__name__
    code = function.__code__
    return hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()[:16]


def instance_record(rig: Rig) -> dict[str, Any]:
    model = cpu_model.build_text(rig)
    weights = cpu_model.text_checkpoint(rig)
    loaded = model.load_weights(iter(weights.items()))
    digest = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    ids = torch.tensor([0, 5, 129257, 129261, 129264])
    embeds = model.embed_input_ids(ids)
    stray = [("image_start", torch.zeros(4)), ("vision.norm.weight", torch.zeros(4))]
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "instance attributes": sorted(set(vars(model)) | set(model._modules)),
        "capabilities": {name: hasattr(model, name) for name in CAPABILITIES},
        "parameters": {name: list(value.shape) for name, value in model.named_parameters()},
        "loaded": sorted(loaded),
        "values": digest.hexdigest(),
        "embeddings": hashlib.sha256(embeds.view(torch.uint8).numpy().tobytes()).hexdigest(),
        "embedding with image keywords": attempt(
            model.embed_input_ids, ids, multimodal_embeddings=[], is_multimodal=ids > 9
        ),
        "image tensors": [attempt(model.load_weights, iter([one])) for one in stray],
        "hash gate bias": attempt(
            model.load_weights, iter([("layers.0.ffn.gate.bias", torch.zeros(8))])
        ),
    }


def foreign_record() -> dict[str, Any]:
    """What another model's start touches: quantisation look-up imports the package."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    return {"fp8 of other models": get_quantization_config("fp8").__name__}
