"""One step with a small image at start-up, so that a worker says only what it has seen.

The step is a scheduler's message like any other and goes through the worker's own `execute_model`
and `sample_tokens`: runner, graph dispatch, metadata builders and layers are the ones that serve.
Its image needs no tower rows (none of its tokens is an IMAGE token), so that every pipeline rank
can run it. It runs when the KV caches exist, before vLLM's own warm-up: that one compiles what is
left, captures the graphs and resets the seed. Every rank runs the same step at the same time, as in
vLLM's warm-up, and then all of them compare what they have seen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vision_exp import evidence, layout
from vision_exp.engine import context, scheduling, sightings
from vision_exp.engine.sightings import Block, Layers, Sightings
from vision_exp.model import ranks, registry
from vision_exp.routing import support as routing
from vision_exp.settings import SELF_TEST
from vision_exp.visibility import support as visibility

logger = logging.getLogger("vllm.vision_exp")

REQUEST = "vision-exp-self-test"
# Few, for the time they take; many enough for a row of the image on every sequence-parallel rank.
ROWS = 64
_WAYS_OUT = (
    f"Report the first line with your vLLM's version. {SELF_TEST.name}=0 starts without this test, "
    "for diagnosis; VISION_EXP_DISABLE=1 serves text as stock vLLM does"
)


class SelfTestError(RuntimeError):
    """Image rows would pass unseen through layers of this model, or the test itself failed."""

    def __init__(self, cause: str, consequence: str) -> None:
        super().__init__(f"[vision-exp] {cause}. {consequence}. {_WAYS_OUT}")


def run(worker: Any) -> None:
    """Test the loaded model of a vision worker, log its evidence line, watch its steps from now on.

    A collective: every rank calls it. Raises SelfTestError, on every rank, naming the layers of all
    ranks that did not see the image; or on one rank, naming the error that ended the test.
    """
    config, runner = worker.vllm_config, worker.model_runner
    visible = visibility.describe(config)
    encodes_only = config.ec_transfer_config and not config.ec_transfer_config.is_ec_consumer
    if not encodes_only and not registry.images_off(config.model_config):
        layers = model_layers(runner, attention=visible == visibility.BIDIRECTIONAL)
        if SELF_TEST.is_on():
            start = time.monotonic()
            refuse(ranks.gather_all(config, _unseen(worker, layers)))
            logger.info(
                "[vision-exp] self-test: an image went through %d layers in %.2f s",
                len(layers.target) + len(layers.draft),
                time.monotonic() - start,
            )
        else:
            logger.warning("[vision-exp] %s=0: nothing was tested at start-up", SELF_TEST.name)
        sightings.watch(runner, layers)
    evidence.log_once("model", config.model_config, routing=routing.RULE, visibility=visible)


def refuse(unseen: list[list[str]]) -> None:
    """SelfTestError if a rank, by number, has layers that did not see the image."""
    by_names: dict[tuple[str, ...], list[int]] = {}
    for rank, names in enumerate(unseen):
        by_names.setdefault(tuple(names), []).append(rank)
    by_names.pop((), None)
    if by_names:
        named = [
            f"{sightings.some(names)} on rank {', '.join(map(str, where))}"
            for names, where in by_names.items()
        ]
        raise SelfTestError(
            "the start is refused: image rows pass unseen through layers of this model, "
            + "; ".join(named),
            "Something in this vLLM goes around the overlay there, and images would be answered as "
            "if they were text; nothing was changed or served",
        )


def model_layers(runner: Any, *, attention: bool) -> Layers:
    """What a rank holds of target and draft. attention: whether image rows see each other here."""
    draft = _draft(runner)
    return Layers(
        target=tuple(_blocks(runner.get_model())),
        draft=() if draft is None else tuple(_blocks(draft)),
        attention=attention,
    )


def _blocks(model: Any) -> Iterator[Block]:
    """The decoder layers: whatever holds routed experts, of a fork's class too."""
    for name, module in model.named_modules():
        if hasattr(getattr(module, "ffn", None), "gate"):
            yield Block(name, id(module.ffn), id(getattr(module, "attn", None)))


def _draft(runner: Any) -> torch.nn.Module | None:
    """The draft's model: V1 has it in `drafter`, V2 in `speculator`; None without a draft model."""
    holder = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model: Any = getattr(holder, "model", None)
    while hasattr(model, "unwrap"):  # of its CUDA graphs
        model = model.unwrap()
    return model if isinstance(model, torch.nn.Module) else None


def _unseen(worker: Any, layers: Layers) -> list[str]:
    """Names of this rank's layers that did not see the image of one step."""
    try:
        with _without_connectors(worker.model_runner), torch.inference_mode():
            return judge(layers, _step(worker))
    except Exception as error:
        # Other ranks may wait for this one in the middle of the step: said before it is raised.
        failed = SelfTestError(
            f"the start-up self-test failed: {type(error).__name__}: {error}",
            "A step with an image does not run here; nothing was changed or served",
        )
        logger.error("%s", failed)
        raise failed from error


def judge(layers: Layers, seen: Sightings) -> list[str]:
    """Layers that did not see the image, with what each of them did not do.

    Of a draft, the layers that this step ran, or all if it ran none. DSpark's rows are never image
    rows, so only the attention of an MTP draft, which reads the prompt's own rows, sees the image.
    """
    blind = [
        f"{one.name} (routing: no image row among its token ids)"
        for one in layers.target
        if one.moe in seen.routed and not bool(seen.routed[one.moe].any())
    ]
    ran = [one for one in layers.draft if one.moe in seen.entered]
    narrow = [
        f"{one.name} (draft attention)"
        for one in ran
        if layers.attention
        and one.name.endswith("mtp_block")
        and one.attention not in seen.attended
    ]
    asleep = [] if ran else [f"{one.name} (draft routing: it did not run)" for one in layers.draft]
    return layers.unseen(seen) + blind + layers.unseen_in_draft(seen) + narrow + asleep


def _step(worker: Any) -> Sightings:
    """What the layers noted in the step; nothing if its runner goes around the overlay's step."""
    context.set_current(context.NO_IMAGES)
    cache = worker.model_runner.kv_cache_config
    worker.execute_model(step_with_image(worker.vllm_config, cache))
    worker.sample_tokens(None)
    seen = context.current().seen
    worker.execute_model(_end())
    return seen or Sightings()


@contextmanager
def _without_connectors(runner: Any) -> Iterator[None]:
    """No transfer of KV or encoder rows: as in vLLM's V2 warm-up; V1 has none with real steps."""
    from vllm.distributed.ec_transfer import ec_transfer_state
    from vllm.distributed.kv_transfer import kv_transfer_state

    rows, kv = ec_transfer_state._EC_CONNECTOR_AGENT, kv_transfer_state._KV_CONNECTOR_AGENT
    connector = getattr(runner, "kv_connector", None)
    try:
        ec_transfer_state._EC_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT = None
        if connector is not None:
            connector.set_disabled(True)
        yield
    finally:
        if connector is not None:
            connector.set_disabled(False)
        ec_transfer_state._EC_CONNECTOR_AGENT, kv_transfer_state._KV_CONNECTOR_AGENT = rows, kv


# --- the scheduler's messages ---------------------------------------------------------------------


def step_with_image(vllm_config: Any, kv_cache_config: Any) -> Any:
    """SchedulerOutput for the whole prompt of one request: an image, and one token of text.

    The image is START, PADs and END behind the leading PADs. Cache blocks are numbered from 1; none
    is in use yet.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    rows = min(
        ROWS,
        scheduling.largest_chunk(vllm_config),
        vllm_config.model_config.max_model_len - 1,
        vllm_config.model_config.hf_config.vision_max_n_token,
    )
    ids = _image(rows - 1) + [0]
    groups = kv_cache_config.kv_cache_groups
    speculative = vllm_config.speculative_config
    ahead = 0 if speculative is None else 2 * speculative.num_speculative_tokens
    tokens = min(rows + 1 + ahead, vllm_config.model_config.max_model_len)
    counts = [-(-tokens // group.kv_cache_spec.block_size) for group in groups]
    if sum(counts) >= kv_cache_config.num_blocks:
        raise ValueError(f"{kv_cache_config.num_blocks} cache blocks do not hold {rows} tokens")
    starts = [1 + sum(counts[:index]) for index in range(len(counts))]
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(
            req_id=REQUEST,
            prompt_token_ids=ids,
            mm_features=[_feature(rows - 1)],
            sampling_params=SamplingParams(max_tokens=2, temperature=0.0),
            pooling_params=None,
            block_ids=tuple([*range(s, s + n)] for s, n in zip(starts, counts, strict=True)),
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=ids,
        )
    ]
    output.num_scheduled_tokens = {REQUEST: rows}
    output.total_num_scheduled_tokens = rows
    output.num_common_prefix_blocks = [0] * len(groups)
    return output


def _image(length: int) -> list[int]:
    """Token ids of an image block at position 0 without IMAGE tokens."""
    pads = layout.leading_pads(0)
    middle = length - pads - 2
    pad = layout.PAD_ID
    return [*[pad] * pads, layout.START_ID, *[pad] * middle, layout.END_ID]


def _feature(length: int) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(0, length, torch.zeros(length, dtype=torch.bool))
    return MultiModalFeatureSpec(None, "image", REQUEST, place, REQUEST)


def _end() -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {REQUEST}
    return output
