"""Checks of scheduling: whole images in chunks, in prefix and connector hits, beside drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from rig_scheduling import (
    TEXT,
    VISION,
    WINDOW,
    build,
    chunks,
    finish_step,
    prefill,
    request,
    retoken,
    split,
    status,
)

from vision_exp.engine import hooks, scheduling


def every_offset() -> dict[str, Any]:
    """One image at every offset of a chunk, then the same image again (cached, then repeated)."""
    bad: list[Any] = []
    for offset in [*range(8), *range(120, 136), *range(250, 262), *range(440, 520, 7)]:
        images = [(offset, 208, "a"), (offset + 208 + 1, 207, "a"), (offset + 600, 207, "a")]
        seen = prefill(VISION, offset + 900, images, tokens=512)
        if seen["split"] or seen["hang"] or not seen["covered"]:
            bad.append((offset, seen))
    return {"bad": bad}


def cached_image() -> dict[str, Any]:
    """Another request encoded the image already; vLLM's own roll-back then skips it."""
    out = {}
    for kind, hf_config in (("overlay", VISION), ("stock", TEXT)):
        scheduler = build(hf_config, tokens=512)
        scheduler.add_request(request(scheduler, "first", 300, [(10, 208, "a")]))
        chunks(scheduler)
        images = [(400, 208, "a")]
        scheduler.add_request(request(scheduler, "second", 900, images, seed=5))
        out[kind] = split(chunks(scheduler)["second"], images)
    return out


def at_chunk_start() -> dict[str, Any]:
    """Decodes leave less budget than the image takes: it waits, and is not split."""
    out = {}
    for kind, hf_config in (("overlay", VISION), ("stock", TEXT)):
        scheduler = build(hf_config, tokens=256, seqs=64)
        for i in range(60):
            scheduler.add_request(request(scheduler, f"d{i}", 4, [], seed=i))
        images = [(0, 208, "a")]
        scheduler.add_request(request(scheduler, "image", 300, images, seed=500))
        seen = chunks(scheduler)
        out[kind] = {"split": split(seen["image"], images), "hang": "hang" in seen}
    return out


def prefix_hits() -> dict[str, Any]:
    """The first prompt leaves blocks that end inside, before and after the second one's image."""
    bad, hits = [], set()
    for offset in (3, 60, 100, 200, 255, 256, 300, 400, 511, 512, 600):
        images = [(offset, 380, "a"), (offset + 381, 207, "b")]
        scheduler = build(VISION, tokens=4096, caching=True)
        scheduler.add_request(request(scheduler, "first", 1400, images))
        chunks(scheduler)
        scheduler.finish_requests("first", status())
        for cut in (offset + 100, offset + 379, offset + 450, 1399, 1400):
            # Same tokens and images; the prompt differs from position `cut` on.
            again = request(scheduler, f"again{cut}", 1400, images)
            again = retoken(scheduler, again, cut, images)
            scheduler.add_request(again)
            seen = chunks(scheduler)[again.request_id]
            hits.add(seen[0][0])
            inside = [key for o, n, key in images if o < seen[0][0] < o + n]
            whole = split(seen, [i for i in images if i[0] >= seen[0][0]])
            if inside or whole:
                bad.append((offset, cut, seen))
            scheduler.finish_requests(again.request_id, status())
    return {"bad": bad, "hits": sorted(hits)}


def stock_hit() -> list[int]:
    """Where a stock scheduler resumes, and where the overlay does: the hit ends in the image."""
    resumed = []
    for hf_config in (TEXT, VISION):
        images = [(300, 380, "a")]
        scheduler = build(hf_config, tokens=4096, caching=True)
        scheduler.add_request(request(scheduler, "first", 1400, images))
        chunks(scheduler)
        scheduler.finish_requests("first", status())
        again = retoken(scheduler, request(scheduler, "again", 1400, images), 600, images)
        scheduler.add_request(again)
        resumed.append(chunks(scheduler)["again"][0][0])
    return resumed


def connector_hits() -> dict[str, Any]:
    """External tokens that would end inside an image are declined; others are taken."""
    scheduler = build(VISION, tokens=4096)
    images = [(300, 380, "a")]
    out = {}
    for external in (256, 512, 1024, 1400):
        connector = mock.Mock()
        connector.get_num_new_matched_tokens = lambda request, local, n=external: (n, False)
        scheduler.connector = connector
        scheduler.vllm_config.kv_transfer_config = SimpleNamespace(kv_load_failure_policy="fail")
        scheduling.AtomicImageScheduler(scheduler).install()
        prompt = request(scheduler, "r", 1400, images)
        out[str(external)] = connector.get_num_new_matched_tokens(prompt, 0)[0]
    ends = request(scheduler, "e", 680, images)
    connector.get_num_new_matched_tokens = lambda request, local: (680, True)
    scheduling.AtomicImageScheduler(scheduler).install()
    out["whole prompt that ends in the image"] = connector.get_num_new_matched_tokens(ends, 0)
    scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
    try:
        scheduling.AtomicImageScheduler(scheduler).install()
        out["recompute"] = "accepted"
    except ValueError as error:
        out["recompute"] = str(error)
    return out


def window_rows() -> dict[str, Any]:
    """While the chunk with the image runs, the window's cache holds START - 127 .. END."""
    scheduler = build(VISION, tokens=640)
    offset, size = 700, 380
    scheduler.add_request(request(scheduler, "r", 1300, [(offset, size, "a")]))
    for _ in range(20):
        output = scheduler.schedule()
        count = output.num_scheduled_tokens["r"]
        running = scheduler.requests["r"]
        stop = running.num_computed_tokens
        if stop - count <= offset and offset + size <= stop:
            group = scheduler.kv_cache_manager.coordinator.single_type_managers[1]
            blocks = group.req_to_blocks["r"]
            null = scheduler.kv_cache_manager.block_pool.null_block
            rows = range(offset - WINDOW + 1, offset + size)
            return {"missing": [row for row in rows if blocks[row // 64] is null]}
        finish_step(scheduler, output)
    return {"missing": "never ran"}


def never_fits() -> dict[str, Any]:
    """An image beyond every budget that passed by the intake: served, and not waited for."""
    images = [(10, 380, "a")]
    seen = prefill(VISION, 500, images, tokens=256)
    return {"hang": seen["hang"], "covered": seen["covered"]}


def text_untouched() -> dict[str, Any]:
    scheduler = build(TEXT, tokens=512, caching=True)
    owners = (scheduler, scheduler.kv_cache_manager, scheduler.kv_cache_manager.coordinator)
    names = ("_try_schedule_encoder_inputs", "get_computed_blocks", "find_longest_cache_hit")
    return {"replaced": [n for n in names for o in owners if n in vars(o)]}


def refusal() -> dict[str, Any]:
    """Intake: vLLM's own InputProcessor.process_inputs with the rest of it left out."""
    from vllm.v1.engine import input_processor

    scheduler = build(VISION, tokens=512)
    config = scheduler.vllm_config
    prompt = request(scheduler, "r", 900, [(400, 383, "a")])
    out = {"wrapped": hasattr(input_processor.InputProcessor.process_inputs, "__wrapped__")}
    for feature in prompt.mm_features:
        feature.data = {}  # as it comes with its image
    renderer = SimpleNamespace(mm_processor_cache=None)
    processor = SimpleNamespace(vllm_config=config, renderer=renderer)
    for tokens in (383, 382):
        config.scheduler_config.max_num_batched_tokens = tokens
        out[str(tokens)] = taken_in(prompt, processor)
    config.scheduler_config.max_num_batched_tokens = 512
    config.scheduler_config.long_prefill_token_threshold = 300
    out["threshold"] = taken_in(prompt, processor)
    # What is not an image block, as here, is refused before its size is looked at.
    out["reserved"] = taken_in(prompt, processor, blocks=False)
    config.model_config.hf_config = TEXT
    out["text model"] = taken_in(prompt, processor, blocks=False)
    return out


def taken_in(prompt: Any, processor: Any, blocks: bool = True) -> str:
    """What the intake says; `blocks`: as if the request's blocks were those of images."""
    answer = mock.patch.object(
        hooks.prompts, "check_processed", side_effect=None if blocks else KeyError("no block")
    )
    with answer as checked:
        try:
            same = hooks._process_inputs(lambda *_: prompt, processor, "r", {}) is prompt
        except Exception as error:  # noqa: BLE001 - the type is what is checked
            return f"{type(error).__name__}: {error}"
        return f"accepted, {checked.call_count} checked" if same else "another request"


def with_draft() -> dict[str, Any]:
    """MTP reads past the chunk's end: several images, every gap, tight and wide budgets."""
    bad, ran, refused = [], 0, 0
    for ahead in (1, 3, 6):
        for gap in (1, 2, 3, 7):
            images = [(9, 207, "a"), (216 + gap, 206, "b"), (422 + 2 * gap, 208, "c")]
            length = 422 + 2 * gap + 208 + 2
            scheduler = build(VISION, tokens=700)
            scheduler.use_eagle = True
            if hasattr(scheduler, "num_prefill_lookahead"):
                scheduler.num_prefill_lookahead = ahead
            spec = SimpleNamespace(
                use_eagle=lambda: True,
                use_multi_module_mtp=lambda: True,
                num_speculative_tokens=ahead,
                max_num_new_slots_for_drafting=0,
            )
            scheduler.vllm_config.speculative_config = spec
            for name in ("_try_schedule_encoder_inputs", "_reserve_prefill_lookahead"):
                scheduler.__dict__.pop(name, None)
            scheduling.AtomicImageScheduler(scheduler).install()
            scheduler.vllm_config.speculative_config = None
            for budget in (650, 636, 450, 430, 221, 215):
                scheduler.max_num_scheduled_tokens = budget
                name = f"r{budget}"
                prompt = request(scheduler, name, length, images)
                config = SimpleNamespace(
                    speculative_config=spec,
                    scheduler_config=SimpleNamespace(
                        max_num_scheduled_tokens=budget,
                        max_num_batched_tokens=700,
                        long_prefill_token_threshold=0,
                    ),
                )
                try:
                    scheduling.check_fits(prompt.mm_features, config)
                except Exception:  # noqa: BLE001 - refused, so it never reaches the scheduler
                    refused += 1
                    continue
                ran += 1
                scheduler.add_request(prompt)
                seen = chunks(scheduler)
                if "hang" in seen or split(seen[name], images):
                    bad.append((ahead, gap, budget, seen))
                scheduler.finish_requests(name, status())
    return {"bad": bad, "ran": ran, "refused": refused}
