"""What a rank builds of the vision part, and when it builds none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import cpu_model
from checks import check, equal, raises
from rig_model import Rig
from vllm.config import VllmConfig


@check
def what_a_rank_builds_and_says_of_it(rig: Rig) -> None:
    import vllm.distributed as dist

    from vision_exp.config import VisionConfigError
    from vision_exp.model import memory
    from vision_exp.model.model import add_vision

    model = cpu_model.build(rig, "small")  # joins a group of one rank
    config = VllmConfig(model_config=rig.model_config(rig.checkpoint("small")))
    bare = SimpleNamespace()
    with mock.patch.object(dist, "get_pp_group", lambda: SimpleNamespace(is_first_rank=False)):
        add_vision(bare, config)
    equal(vars(bare), {"tower_disabled_reason": "only the first pipeline rank embeds images"})
    multimodal = config.model_config.multimodal_config
    with mock.patch.object(type(multimodal), "mm_encoder_only", True, create=True):
        vars(multimodal).pop("mm_encoder_only", None)
        with raises(VisionConfigError, "--mm-encoder-only is not supported"):
            add_vision(SimpleNamespace(), config)
    tower = [*model.vision.parameters(), *model.aligner.parameters()]
    for ranks, mode, graphs in ((1, "weights", True), (2, "weights", False), (2, "data", True)):
        said: list[Any] = []

        def line(parameters: Any, *sizes: int, said: Any = said, **options: bool) -> str:
            said.append(([one.shape for one in parameters], *sizes, options))
            return ""

        with (
            mock.patch.object(memory, "line", line),
            mock.patch.object(config.parallel_config, "tensor_parallel_size", ranks),
            mock.patch.object(multimodal, "mm_encoder_tp_mode", mode),
        ):
            add_vision(model, config)
        rows, hidden = config.scheduler_config.max_num_batched_tokens, model.config.hidden_size
        expected = ([one.shape for one in tower], rows, hidden, {"graphs": graphs})
        equal(said, [expected], f"{ranks} ranks, {mode}")


@check
def a_config_overridden_to_text_builds_vllms_own_class(rig: Rig) -> None:
    """vLLM keeps the class that it found for a path, and gives it here too."""
    vision = cpu_model.build(rig, "small")
    text = cpu_model.build(rig, "small", model_options={"hf_overrides": {"vision_n_layers": 0}})
    equal(type(text) is type(vision).text_class, True)
    equal(hasattr(text, "vision"), False)


@check
def a_step_that_isolates_failures_encodes_by_them(rig: Rig) -> None:
    from vision_exp.engine import context

    model = cpu_model.build(rig, "small")
    failures = mock.Mock()
    with mock.patch.object(context, "current", lambda: SimpleNamespace(failures=failures)):
        equal(model.embed_multimodal(perm=1) is failures.encode.return_value, True)
    (encode, given), template = failures.encode.call_args.args, failures.encode.call_args.kwargs
    equal(given, {"perm": 1})
    equal(template["template"] is model.image_start, True)
    equal(encode.keywords, {"data_parallel": False})
