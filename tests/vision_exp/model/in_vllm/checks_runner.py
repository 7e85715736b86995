"""The self-test's messages in vLLM's own V1 runner and worker, which run on a CPU.

Stand-ins: the language model, of which only the embeddings are asked, and attention's groups. V2's
runner needs a GPU; it gets the same messages, and those are what its own warm-up sends.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import cpu_model
import torch
from checks import check, equal
from rig_model import Rig

VOCABULARY = 129280


def vllm_config(rig: Rig) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(
        model=str(rig.vision_folder),
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        block_size=64,
    )
    return made.create_engine_config()


def model(hidden: int) -> torch.nn.Module:
    """The overlay's embeddings over a model that records what it is given."""
    from vision_exp.engine import context
    from vision_exp.model.model import LEARNED, VisionExpMixin

    class Text(torch.nn.Module):
        def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(ids), hidden)

    class Model(VisionExpMixin, Text):
        def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
            now = context.current()
            self.given = (input_ids.tolist(), positions.tolist(), inputs_embeds, now)
            return torch.zeros(len(positions), hidden)

        def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(rows), VOCABULARY)

    made = Model()
    for kind, name in enumerate(LEARNED, 1):
        setattr(made, name, torch.nn.Parameter(torch.full((hidden,), float(kind))))
    return made


@check
def the_self_test_runs_in_vllms_own_v1_runner(rig: Rig) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.worker import block_table
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    from vision_exp.model import selftest

    config = vllm_config(rig)
    cpu_model.build(rig, "small")  # joins a group of one rank
    shape = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    spec = SlidingWindowSpec(block_size=64, sliding_window=128, **shape)
    with set_current_vllm_config(config):
        runner = CPUModelRunner(config, torch.device("cpu"))
    runner.model = model(config.model_config.get_hidden_size())
    runner.kv_cache_config = KVCacheConfig(50, [], [KVCacheGroupSpec(["x"], spec)])
    runner.attn_groups = [[]]
    worker = object.__new__(Worker)
    worker.vllm_config, worker.model_runner = config, runner
    worker.use_v2_model_runner, worker.profiler, worker._pp_send_work = False, None, []
    # Slots are asked of a compiled operator, which not every CPU build of these releases has.
    slots = mock.patch.object(
        block_table, "_compute_slot_mapping_kernel", mock.MagicMock(), create=True
    )
    for _ in range(2):  # nothing of the first is left for a second one
        with slots, set_current_vllm_config(config), torch.inference_mode():
            seen = selftest._step(worker)
        ids, positions, embeds, now = runner.model.given
        equal((ids[2:5], ids[-2:]), ([129258, 129257, 129258], [129261, 0]))
        equal(positions, list(range(64)))
        kinds = [1 if id == 129257 else 4 if id == 129261 else 2 for id in ids[:-1]]
        equal(embeds[:, 0].tolist(), [*kinds, 0], "learned vectors, then text")
        equal((now.has_image_rows, now.request_ids), (True, (selftest.REQUEST,)))
        equal(now.seen is seen, True, "the notes of this step")
        equal((list(runner.requests), runner.input_batch.num_reqs), ([], 0))
