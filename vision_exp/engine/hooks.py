"""Everything that the engine room changes in vLLM: scheduler, intake, client and model runners."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from vision_exp import patching
from vision_exp.chat import prompts
from vision_exp.config import is_vision_exp
from vision_exp.engine import (
    context,
    graphs,
    intake,
    retention,
    scheduling,
    sightings,
    step,
    unread,
)
from vision_exp.engine.failures import client, worker
from vision_exp.engine.failures import scheduler as failed_requests

# What this room needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.config.kv_transfer:KVTransferConfig.kv_load_failure_policy",
    "vllm.config.multimodal:MultiModalConfig.mm_processor_cache_type",
    "vllm.config.parallel:ParallelConfig.{world_size, tensor_parallel_size}",
    "vllm.config.scheduler:SchedulerConfig.{max_num_scheduled_tokens, max_num_batched_tokens, "
    "long_prefill_token_threshold}",
    "vllm.config.speculative:SpeculativeConfig.use_multi_module_mtp since 0.27",
    "vllm.config.speculative:SpeculativeConfig.{max_num_new_slots_for_drafting, "
    "num_speculative_tokens, use_eagle}",
    "vllm.config.vllm:VllmConfig.{kv_transfer_config, ec_transfer_config}",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:"
    "KVConnectorBase_V1.get_num_new_matched_tokens(request, num_computed_tokens)",
    "vllm.distributed.parallel_state:GroupCoordinator.{cpu_group, world_size}",
    "vllm.distributed.parallel_state:get_tp_group",
    "vllm.exceptions:GenerationError | vllm.entrypoints.openai.engine.protocol:GenerationError",
    "vllm.exceptions:VLLMValidationError",
    "vllm.multimodal.cache:BaseMultiModalProcessorCache.{is_cached_item(mm_hash), clear_cache, "
    "touch_sender_cache_item(mm_hash), get_and_update_item(mm_item, mm_hash), make_stats(delta), "
    "close}",
    "vllm.multimodal.cache:BaseMultiModalReceiverCache.get_and_update_features(mm_features)",
    "vllm.multimodal.inputs:MultiModalFeatureSpec.{mm_position, identifier, mm_hash, data}",
    "vllm.multimodal.inputs:PlaceholderRange.{offset, length, get_num_embeds}",
    "vllm.outputs:CompletionOutput.{finish_reason, stop_reason}",
    "vllm.outputs:RequestOutput.{request_id, outputs}",
    "vllm.v1.core.block_pool:BlockPool.{null_block, num_gpu_blocks}",
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.{cached, freeable, freed, "
    "num_free_slots}",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.{find_longest_cache_hit(block_hashes, "
    "max_cache_hit_length), single_type_managers}",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.{coordinator, get_computed_blocks(request), "
    "get_block_ids(request_id), evict_blocks(block_ids), block_pool}",
    "vllm.v1.core.sched.output:CachedRequestData.{req_ids, num_computed_tokens}",
    "vllm.v1.core.sched.output:NewRequestData.{req_id, num_computed_tokens, mm_features}",
    "vllm.v1.core.sched.output:SchedulerOutput.{finished_req_ids, scheduled_new_reqs, "
    "scheduled_cached_reqs, num_scheduled_tokens, free_encoder_mm_hashes}",
    "vllm.v1.core.sched.scheduler:Scheduler._reserve_prefill_lookahead(request, "
    "num_computed_tokens, num_new_tokens) since 0.28",
    "vllm.v1.core.sched.scheduler:Scheduler.{__init__, _try_schedule_encoder_inputs(request, "
    "num_computed_tokens, num_new_tokens, encoder_compute_budget), connector, kv_cache_manager, "
    "vllm_config, update_from_output(scheduler_output, model_runner_output), "
    "finish_requests(request_ids, finished_status), requests, encoder_cache_manager, "
    "add_request(request), schedule}",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.retention_interval since 0.27",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.block_size",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.{cache_blocks(request, "
    "num_tokens), reachable_block_mask(alignment_tokens, retention_interval), use_eagle} since "
    "0.27",
    "vllm.v1.cudagraph_dispatcher:CUDAGraphMode",
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch(num_tokens, valid_modes, "
    "invalid_modes)",
    "vllm.v1.engine.async_llm:AsyncLLM.{generate, vllm_config}",
    "vllm.v1.engine.core:EngineCoreProc.{_handle_request_preproc_error(request), scheduler}",
    "vllm.v1.engine.input_processor:InputProcessor.{process_inputs(request_id, prompt), "
    "vllm_config, renderer}",
    "vllm.v1.engine:EngineCoreOutput.{request_id, new_token_ids, finish_reason, stop_reason}",
    "vllm.v1.engine:EngineCoreOutputs.outputs",
    "vllm.v1.engine:FinishReason.ERROR",
    "vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
    "vllm.v1.request:Request.{mm_features, num_tokens, request_id, client_index, is_finished}",
    "vllm.v1.request:RequestStatus.FINISHED_ERROR",
    "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor.{cg_mode, num_tokens, num_reqs}",
    "vllm.v1.worker.gpu.cudagraph_utils:CUDAGraphMode",
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.dispatch(num_reqs, num_tokens)",
    "vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache.{encoder_outputs, mm_features}",
    "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner.{prepare_mm_inputs, gather_mm_embeddings, "
    "encoder_cache}",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.{execute_model(scheduler_output), _dummy_run, "
    "capture_model, sample_tokens(grammar_output), encoder_cache, vllm_config}",
    "vllm.v1.worker.worker_base:WorkerWrapperBase.{_apply_mm_cache(scheduler_output), "
    "mm_receiver_cache}",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.{execute_model(scheduler_output), _dummy_run, "
    "capture_model, sample_tokens(grammar_output), "
    "_batch_mm_inputs_from_scheduler(scheduler_output), _gather_mm_embeddings(scheduler_output), "
    "encoder_cache, requests, vllm_config}",
)


def install() -> None:
    """Wrap scheduler, intake, client, model runners and CUDA graph dispatchers once imported."""
    patching.when_imported("vllm.v1.core.sched.scheduler", _wrap_scheduler)
    patching.when_imported("vllm.v1.engine.input_processor", _wrap_input_processor)
    patching.when_imported("vllm.v1.engine.core", _wrap_core)
    patching.when_imported("vllm.v1.worker.worker_base", _wrap_worker)
    patching.when_imported("vllm.v1.engine.async_llm", _wrap_client)
    patching.when_imported("vllm.v1.worker.gpu_model_runner", _wrap_runner_v1)
    patching.when_imported("vllm.v1.worker.gpu.model_runner", _wrap_runner)
    patching.when_imported("vllm.v1.worker.gpu.mm.encoder_runner", _wrap_encoder_runner)
    patching.when_imported("vllm.v1.cudagraph_dispatcher", _wrap_dispatcher_v1)
    patching.when_imported("vllm.v1.worker.gpu.cudagraph_utils", _wrap_dispatcher_v2)


# --- scheduler, intake and client -----------------------------------------------------------------


def _wrap_scheduler(module: ModuleType) -> None:
    patching.wrap(module.Scheduler, "__init__", _scheduler_init)
    patching.wrap(module.Scheduler, "update_from_output", _update_from_output)
    patching.wrap(module.Scheduler, "add_request", _schedule_later)
    patching.wrap(module.Scheduler, "schedule", _schedule)


def _scheduler_init(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    original(scheduler, *args, **kwargs)
    model_config = getattr(scheduler.vllm_config, "model_config", None)
    if model_config is not None and is_vision_exp(model_config.hf_config):
        rules = scheduling.AtomicImageScheduler(scheduler)
        rules.install()
        coordinator = scheduler.kv_cache_manager.coordinator
        retention.ImageRetention(rules.lookahead).install(coordinator)
        unread.watch(scheduler)


def _schedule_later(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    unread.arrived(scheduler, request)
    return original(scheduler, request)


def _schedule(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    return unread.add_ended(scheduler, original(scheduler, *args, **kwargs))


def _wrap_core(module: ModuleType) -> None:
    patching.wrap(module.EngineCoreProc, "_handle_request_preproc_error", _refused)


def _refused(original: Callable[..., Any], core: Any, request: Any) -> Any:
    unread.arrived(core.scheduler, request)  # and ended: it gets no further
    return original(core, request)


def _update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    failed = failed_requests.failed_step(model_runner_output)
    if failed is None:
        return original(scheduler, scheduler_output, model_runner_output)
    # Before vLLM looks at the output, so that it drops what was sampled for these requests.
    ended = failed_requests.end_requests(scheduler, failed)
    outputs = original(scheduler, scheduler_output, model_runner_output)
    failed_requests.add_errors(outputs, ended)
    return outputs


def _wrap_input_processor(module: ModuleType) -> None:
    patching.wrap(module.InputProcessor, "process_inputs", _process_inputs)


def _process_inputs(
    original: Any, processor: Any, request_id: Any, prompt: Any, *args: Any, **kwargs: Any
) -> Any:
    vllm_config = processor.vllm_config
    if not is_vision_exp(vllm_config.model_config.hf_config):
        return original(processor, request_id, prompt, *args, **kwargs)
    prompts.check_rendered(prompt)
    request = original(processor, request_id, prompt, *args, **kwargs)
    # Placeholders first: only blocks that are what they claim have a size to speak of.
    prompts.check_processed(request, vllm_config.model_config.hf_config)
    intake.check_known(processor.renderer.mm_processor_cache, request.mm_features or ())
    scheduling.check_fits(request.mm_features or (), vllm_config)
    return request


def _wrap_client(module: ModuleType) -> None:
    patching.wrap(module.AsyncLLM, "generate", _generate)


def _generate(
    original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[Any, None]:
    outputs = original(engine, *args, **kwargs)
    vision = is_vision_exp(engine.vllm_config.model_config.hf_config)
    return client.raise_failures(outputs) if vision else outputs


# --- model runners --------------------------------------------------------------------------------


def _wrap_worker(module: ModuleType) -> None:
    patching.wrap(module.WorkerWrapperBase, "_apply_mm_cache", _apply_mm_cache)


def _apply_mm_cache(original: Callable[..., Any], worker: Any, scheduler_output: Any) -> None:
    unread.read(worker.mm_receiver_cache, scheduler_output)
    original(worker, scheduler_output)


def _wrap_runner_v1(module: ModuleType) -> None:
    _wrap_runner(module)
    runner = module.GPUModelRunner
    patching.wrap(runner, "_batch_mm_inputs_from_scheduler", _list_inputs)
    patching.wrap(runner, "_gather_mm_embeddings", _gather_v1)


def _wrap_runner(module: ModuleType) -> None:
    runner = module.GPUModelRunner
    patching.wrap(runner, "execute_model", _execute_model)
    patching.wrap(runner, "sample_tokens", _sample_tokens)
    patching.wrap(runner, "_dummy_run", _without_images)
    patching.wrap(runner, "capture_model", _without_images)


def _wrap_encoder_runner(module: ModuleType) -> None:
    patching.wrap(module.EncoderRunner, "prepare_mm_inputs", _list_inputs)
    patching.wrap(module.EncoderRunner, "gather_mm_embeddings", _gather_v2)


def _execute_model(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    # The step is known before anything of it runs: gathering, graph dispatch and routing ask.
    # Failures begin after it, in the same value: only a step with images gives zeros. They report
    # last, when every image of the step was tried; drafts that sample_tokens runs come after that.
    draft = step.begin(runner, scheduler_output)
    output = original(runner, scheduler_output, *args, **kwargs)
    now = context.current()
    if now.has_image_rows:
        sightings.check(runner, now.seen, draft=False)
    context.publish(has_image_rows=draft, image_mask=None)
    return _report(output)


def _sample_tokens(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(runner, *args, **kwargs)
    now = context.current()
    if now.has_image_rows:
        sightings.check(runner, now.seen, draft=True)
    return _report(output)


def _report(output: Any) -> Any:
    failures = context.current().failures
    return output if failures is None else failures.report(output)


def _without_images(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    context.set_current(context.NO_IMAGES)
    return original(runner, *args, **kwargs)


def _list_inputs(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    found = original(self, *args, **kwargs)
    failures = context.current().failures
    if failures is not None:
        failures.will_encode(*found[:2])
    return found


def _gather_v1(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    with _zero_fill(runner.encoder_cache, lambda name: runner.requests[name].mm_features):
        return original(runner, *args, **kwargs)


def _gather_v2(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    cache = runner.encoder_cache
    with _zero_fill(cache.encoder_outputs, lambda name: cache.mm_features[name]):
        return original(runner, *args, **kwargs)


def _zero_fill(rows: worker.Rows, features: worker.Features) -> AbstractContextManager[None]:
    now = context.current()
    if now.failures is None or not now.has_image_rows:
        return nullcontext()
    return now.failures.zero_fill(rows, features)


def _wrap_dispatcher_v1(module: ModuleType) -> None:
    patching.wrap(module.CudagraphDispatcher, "dispatch", graphs.dispatch_v1(module))


def _wrap_dispatcher_v2(module: ModuleType) -> None:
    patching.wrap(module.CudaGraphManager, "dispatch", graphs.dispatch_v2(module))
