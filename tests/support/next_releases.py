"""What next releases of vLLM could change, and what `drift` has to say of each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from anchors.releases import known

NEWEST, NATIVE = known.newest(), known.versions(known.NATIVE)[-1]
MODEL = "models/deepseek_v4/nvidia/model.py"
DSPARK = "models/deepseek_v4/nvidia/dspark.py"
MTP, MTP_SITES = "models/deepseek_v4/nvidia/mtp.py", ("mtp-bias-vl", "mtp-hook")
CONFIG = "transformers_utils/configs/deepseek_v4.py"
ENCODING = "tokenizers/deepseek_v4_encoding.py"
REGISTRY = "model_executor/models/registry.py"
PACKAGE = "models/deepseek_v4/__init__.py"
SCHEDULER = "v1/core/sched/scheduler.py"
RENDERER = "renderers/deepseek_v4.py"
SWA = "v1/attention/backends/mla/sparse_swa.py"
PROCESSOR = "multimodal/processing/processor.py"
DISPATCHER = "v1/cudagraph_dispatcher.py"


def sub(pattern: str, text: str) -> Callable[[str], str]:
    return lambda source: re.sub(pattern, text, source)


def append(text: str) -> Callable[[str], str]:
    return lambda source: source + text


@dataclass(frozen=True)
class Next:
    """`drifted`: the columns that must have; `says`: text of the findings; `findings`: how many."""

    name: str
    edits: dict[str, Callable[[str], str] | None]
    drifted: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    base: str = NEWEST
    native: bool = False
    findings: int = 1


BASE_CLASS = r"(class DeepseekV4ForCausalLM\()"
CASES = (
    # What must not matter.
    Next("added base class", {MODEL: sub(BASE_CLASS, r"\1 object,")}),
    Next(
        "added decorator",
        {MODEL: sub(r"\nclass DeepseekV4Model\(", r"\n@staticmethod\nclass DeepseekV4Model(")},
    ),
    Next(
        "added parameter", {MODEL: sub(r"(def _make_deepseek_v4_weights_mapper\()", r"\1*args, ")}
    ),
    Next("comment and blank lines", {DSPARK: append("\n\n# the end\n")}),
    Next("line endings", {CONFIG: lambda s: s.replace("\n", "\r\n")}),
    Next("renamed local", {MTP: sub(r"\bloaded_weight\b", "tensor")}),
    # Anchors that drift.
    Next(
        "renamed class",
        {MODEL: sub(r"\bDeepseekV4MoE\b", "DeepseekV4SparseExperts")},
        ("model-hook", "run-time"),
        ("top-level class DeepseekV4MoE", "class DeepseekV4SparseExperts (its body is nearly"),
    ),
    Next(
        "renamed config class",
        {CONFIG: sub(r"\bDeepseekV4Config\b", "DeepseekV4TextConfig")},
        ("config-hook", "run-time"),
        ("top-level class DeepseekV4Config", "DeepseekV4TextConfig"),
    ),
    Next(
        "moved file",
        {CONFIG: None, "transformers_utils/configs/deepseek/v4.py": append("pass\n")},
        ("config-hook", "run-time"),
        ("no such file",),
    ),
    Next(
        "class moved to another module",
        {
            MODEL: sub(r"\nclass DeepseekV4DecoderLayer\b", r"\nclass _Gone"),
            "models/deepseek_v4/nvidia/layer.py": append("class DeepseekV4DecoderLayer:\n ...\n"),
        },
        ("model-hook", "run-time"),
        ("nvidia/layer.py:1: class DeepseekV4DecoderLayer",),
    ),
    Next(
        "router import dropped",
        {MODEL: sub(r"\bfused_topk_bias\b", "fused_topk")},
        ("model-hook", "run-time"),
        ("top-level import of fused_topk_bias", "0 of it"),
    ),
    Next(
        "gate suffix changed",
        {MODEL: sub(r'"\.ffn\.gate\.bias"', '".ffn.norm_gate.bias"')},
        ("model-hook",),
        ("_make_deepseek_v4_weights_mapper", "norm_gate"),
    ),
    Next(
        "class defined twice",
        {MODEL: append("\n\nclass DeepseekV4Model:\n    pass\n")},
        ("model-hook", "run-time"),
        ("2 of it",),
    ),
    Next(
        "rename statement gone from one draft",
        {DSPARK: sub(r'"\.ffn\.gate\.bias"', '".ffn.gate.score_bias"')},
        ("dspark-bias-vl", "dspark-hook"),
        ("in load_weights of a top-level class", "since"),
    ),
    Next(
        "rename in another scope",
        {MTP: sub(r"def load_weights\b", "def read_weights")},
        MTP_SITES,
        ("load_weights",),
    ),
    Next(
        "syntax error",
        {DSPARK: append("\ndef broken(:\n")},
        ("dspark-bias-vl", "dspark-hook"),
        ("does not parse",),
    ),
    Next(
        "file emptied", {MTP: lambda _: ""}, ("mtp-bias-vl", "mtp-hook", "run-time"), ("is empty",)
    ),
    # What would only break at run time.
    Next(
        "registry method renamed",
        {REGISTRY: sub(r"def inspect_model_cls\(", "def inspect_model_class(")},
        ("run-time",),
        ("inspect_model_cls", "nearest: inspect_model_class"),
    ),
    Next(
        "registry signature changed",
        {
            REGISTRY: sub(
                r"(class _ModelRegistry[\s\S]*?def inspect_model_cls\(\s*self,\s*)architectures",
                r"\1names",
            )
        },
        ("run-time",),
        ("does not take architectures",),
    ),
    Next(
        "scheduler class split away",
        {SCHEDULER: sub(r"\nclass Scheduler\(", "\nclass BaseScheduler(")},
        ("run-time",),
        ("has no Scheduler",),
    ),
    Next(
        "graph dispatcher moved",
        {DISPATCHER: None},
        ("run-time",),
        ("vllm.v1.cudagraph_dispatcher is missing",),
    ),
    Next(
        "scheduler signature changed",
        {
            SCHEDULER: sub(
                r"(def _try_schedule_encoder_inputs\([\s\S]*?)num_new_tokens: int", r"\1n: int"
            )
        },
        ("run-time",),
        ("does not take num_new_tokens", "engine/hooks.py needs", "-        num_new_tokens: int,"),
    ),
    Next(
        "renderer method removed",
        {RENDERER: sub(r"async def render_messages_async\(", "async def render_async(")},
        ("run-time",),
        ("DeepseekV4Renderer has no render_messages_async", "chat/hooks.py needs"),
    ),
    Next(
        "processing API split up",
        {PROCESSOR: sub(r"def _apply_prompt_updates\(", "def _apply_updates_to_ids(")},
        ("run-time",),
        ("has no _apply_prompt_updates", "def _apply_updates_to_ids (its body is nearly the same)"),
    ),
    Next(
        "processing API returns to the text hooks",
        {PROCESSOR: sub(r"(def _apply_hf_processor_main\(\s*self,\s*)mm_items\b", r"\1items")},
        ("run-time",),
        ("_apply_hf_processor_main", "does not take mm_items"),
    ),
    Next(
        "module moved",
        {
            DISPATCHER: None,
            "v1/cudagraph/dispatcher.py": lambda _: (
                "class CUDAGraphMode: ...\nclass CudagraphDispatcher: ...\n"
            ),
        },
        ("run-time",),
        ("v1/cudagraph/dispatcher.py:2: class CudagraphDispatcher",),
    ),
    Next(
        "runner field renamed",
        {"v1/worker/gpu_input_batch.py": sub(r"\breq_ids\b", "request_ids")},
        ("run-time",),
        ("InputBatch has no req_ids", "visibility/hooks.py needs"),
    ),
    Next(
        "output field removed",
        {"v1/core/sched/output.py": sub(r"\n    finished_req_ids:", "\n    finished:")},
        ("run-time",),
        ("SchedulerOutput has no finished_req_ids", "engine/hooks.py needs"),
    ),
    # Facts that tell releases apart: a tree that lost one is no older release.
    Next(
        "index of prefill rows renamed",
        {SWA: sub(r"\bprefill_swa_indices\b", "prefill_window_indices")},
        ("run-time",),
        ("DeepseekSparseSWAMetadata has no prefill_swa_indices", "since 0.24"),
    ),
    Next(
        "shared rows renamed, and with them what shares a mask",
        {
            MODEL: sub(r"\bself\.use_sequence_parallel\b", "self.shares_rows"),
            MTP: sub(r"\bsp_shard\b", "shard_rows"),
        },
        ("run-time",),
        ("does not bind sp_shard", "since 0.27"),
    ),
    Next(
        "lookahead renamed in one of its places",
        {SCHEDULER: sub(r"\b(_reserve_prefill_lookahead|num_prefill_lookahead)\b", r"\1_2")},
        ("run-time",),
        ("has no _reserve_prefill_lookahead", "since 0.28"),
    ),
    # Native support.
    Next("native with a renamed tower", {PACKAGE: append("\n")}, base=NATIVE, native=True),
    Next(
        "native with the registry entry reformatted",
        {REGISTRY: sub(r'("DeepseekV4ForConditionalGeneration"):\s*\(', r"\1  :  (\n        ")},
        base=NATIVE,
        native=True,
    ),
    Next(
        "a text-only tree that gains the native class",
        {
            REGISTRY: sub(
                r'(\n\s*)("DeepseekV4ForCausalLM":)',
                r'\1"DeepseekV4ForConditionalGeneration": '
                r'("vllm.models.deepseek_v4", "DeepseekV4ForConditionalGeneration"),\1\2',
            ),
            PACKAGE: append("\n\nclass DeepseekV4ForConditionalGeneration:\n    pass\n"),
        },
        native=True,
    ),
)
