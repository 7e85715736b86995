"""Checks that a failing image ends its requests and nothing else, in one process.

The release's scheduler and KV cache manager, and tiny_runner.py as the worker; what passes between
them is pickled, as it is between processes. failures_child.py has the processes.
"""

from __future__ import annotations

import pickle
from typing import Any

import rig_scheduling
import tiny_requests
from rig_failures import Engine, alone

from vision_exp.engine.failures import ranks, scheduler


def check_failing_image(hf_config: Any) -> None:
    for runner in ("v1", "v2"):
        engine = Engine(hf_config, runner, 2.0)
        long = {"before": 300, "after": 300}
        engine.add("good", [1.0, 3.0])
        engine.add("bad", [4.0, 2.0], seed=1, **long)
        engine.add("text", seed=2)
        assert engine.run() == {"good": "length", "bad": "error", "text": "length"}, runner
        assert engine.tokens["good"] == alone(hf_config, runner, [1.0, 3.0])
        assert engine.tokens["text"] == alone(hf_config, runner, [], seed=2)
        assert engine.tokens["bad"] == [] and "picture 2.0 broke" in engine.reasons["bad"]
        # Its place in the encoder cache is free and the worker holds no rows for it.
        manager = engine.scheduler.encoder_cache_manager
        assert set(manager.cached) == {"1.0", "3.0", "4.0"}
        held = sum(r.get_num_encoder_embeds(0) for r in [engine.add("x", [1.0])])
        engine.scheduler.finish_requests("x", rig_scheduling.status())
        assert manager.num_free_slots == manager.cache_size - 3 * held
        assert manager.num_freeable_slots == manager.cache_size
        # Blocks before the image are good and found again; those from it on are not.
        calls = len(engine.model.calls)
        engine.add("again", [4.0, 2.0], seed=1, **long)
        assert engine.run()["again"] == "error", runner
        assert len(engine.model.calls) > calls, "not encoded again"
        assert engine.hits["again"] == 512, (runner, engine.hits)
        # Once the picture can be encoded, it is, and everything is found again.
        engine.model.broken.clear()
        for name, hit in (("cured", 512), ("hit", 768)):
            engine.add(name, [4.0, 2.0], seed=1, **long)
            assert engine.run()[name] == "length" and engine.hits[name] == hit, (runner, hit)
            assert engine.tokens[name] == alone(hf_config, runner, [4.0, 2.0], seed=1, **long)
        assert float(engine.rows["2.0"][0, 0]) == 2.0


def check_requests_that_share_blocks(hf_config: Any) -> None:
    """Scheduled in the same step, a prefix is shared before it is computed."""
    engine = Engine(hf_config, "v2", 2.0)
    long = {"before": 20, "after": 600}
    engine.add("bad", [2.0], **long)
    engine.add("same", [2.0], **long)
    engine.add("beside", [1.0], seed=3)
    output = engine.schedule()
    # A hit that covers the image, so that no token of the request itself reads it.
    assert engine.hits["same"] == 512 and len(output.num_scheduled_tokens) == 3
    engine.update(output, engine.work(output))
    assert engine.run() == {"bad": "error", "same": "error", "beside": "length"}
    assert "shares blocks" in engine.reasons["same"]


def check_steps_in_flight(hf_config: Any) -> None:
    """Under asynchronous scheduling the next step is scheduled before the failure is known."""
    for runner in ("v1", "v2"):
        engine = Engine(hf_config, runner, 2.0)
        engine.add("bad", [2.0])
        first = engine.schedule()
        engine.add("late", [2.0], seed=5)  # finds the image in the encoder cache
        second = engine.schedule()
        assert "late" not in second.scheduled_encoder_inputs
        failed = engine.work(first)
        late = engine.work(second)
        engine.update(first, failed)
        engine.update(second, late)
        assert engine.run() == {"bad": "error", "late": "error"}, runner
        engine.model.broken.clear()
        engine.add("cured", [2.0], seed=5)
        assert engine.run()["cured"] == "length"
        assert engine.tokens["cured"] == alone(hf_config, runner, [2.0], seed=5)


def check_preempted_while_it_ran(hf_config: Any) -> None:
    engine = Engine(hf_config, "v2", 2.0)
    bad = engine.add("bad", [2.0], before=300, after=300)
    output = engine.schedule()
    failed = engine.work(output)
    engine.scheduler._preempt_request(bad, 0.0)
    engine.scheduler.running.remove(bad)
    engine.update(output, failed)
    assert engine.ends == {"bad": "error"}
    engine.add("again", [2.0], before=300, after=300)
    engine.schedule()
    assert engine.hits["again"] == 0


def check_cancelled_while_it_ran(hf_config: Any) -> None:
    """A client that hangs up leaves nothing in the prefix cache for the next one to find."""
    from vllm.v1.request import RequestStatus

    long = {"before": 300, "after": 600}
    for runner in ("v1", "v2"):
        engine = Engine(hf_config, runner, 2.0)
        engine.add("bad", [2.0], **long)
        engine.add("beside", [1.0], seed=3)
        first = engine.schedule()
        engine.add("late", [2.0], **long)
        second = engine.schedule()
        assert engine.hits["late"] == 768
        failed = engine.work(first)
        # vLLM does so between a step and its output.
        engine.scheduler.finish_requests("bad", RequestStatus.FINISHED_ABORTED)
        late = engine.work(second)
        engine.update(first, failed)
        engine.update(second, late)
        engine.model.broken.clear()
        assert engine.run() == {"late": "error", "beside": "length"}, runner
        engine.add("again", [2.0], **long)
        engine.run()
        assert engine.tokens["again"] == alone(hf_config, runner, [2.0], **long), runner


def check_samples_of_one_prompt(hf_config: Any) -> None:
    """In the engine's own process they share the prompt's images, also with the worker."""
    for runner in ("v1", "v2"):
        engine = Engine(hf_config, runner, 2.0)
        first = engine.add("0", [2.0, 1.0])
        other = tiny_requests.request("1", [2.0, 1.0], engine.scheduler.hasher)
        other.mm_features = first.mm_features
        engine.scheduler.add_request(other)
        output = engine.schedule()
        assert len(output.num_scheduled_tokens) == 2
        engine.worker.execute_model(output)
        assert [feature.identifier for feature in first.mm_features] == ["2.0", "1.0"]
        engine.update(output, engine.worker.sample_tokens(None))
        assert engine.ends == {"0": "error", "1": "error"}, runner
        assert all("picture 2.0 broke" in reason for reason in engine.reasons.values())


def check_failing_batch(hf_config: Any) -> None:
    """A batch that fails as a whole is encoded image by image; all requests are answered."""
    engine = Engine(hf_config, "v2")
    engine.model.most = 1
    engine.add("a", [1.0, 2.0])
    engine.add("b", [3.0], seed=1)
    assert engine.run() == {"a": "length", "b": "length"}
    assert engine.model.calls == [[1.0, 2.0, 3.0], [1.0], [2.0], [3.0]]
    assert engine.tokens["a"] == alone(hf_config, "v2", [1.0, 2.0])


def check_wrong_number_of_rows(hf_config: Any) -> None:
    """From the tower; too many would shift the next image's."""
    engine = Engine(hf_config, "v2")
    stock = engine.model.aligner
    engine.model.aligner = lambda rows, grids: (
        stock(rows, grids)[:-1] if 2.0 in rows else stock(rows, grids)
    )
    engine.add("a", [1.0])
    engine.add("b", [2.0], seed=1)
    assert engine.run() == {"a": "length", "b": "error"}


def check_rows_of_another_picture(hf_config: Any) -> None:
    """One uuid for two pictures: rows are cached, but not as many as there are placeholders."""
    for runner in ("v1", "v2"):
        engine = Engine(hf_config, runner)
        engine.add("first", [1.0], key="mine")
        engine.run()
        engine.add("other", [2.0], key="mine", seed=1, grid=(2, 4))
        engine.add("first again", [1.0], key="mine", seed=2)
        ends = engine.run()
        assert ends == {"first": "length", "other": "error", "first again": "length"}, runner
        assert "4 rows for 8" in engine.reasons["other"]
        assert engine.tokens["first again"] == alone(hf_config, runner, [1.0], key="mine", seed=2)


def check_nothing_is_added_without_a_failure(hf_config: Any) -> None:
    """Outputs are stock's to the byte, with images and without."""
    import copy

    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

    engine = Engine(hf_config, "v1", 2.0)
    engine.add("a", [1.0])
    engine.add("text", seed=1)
    engine.run()
    for sent in engine.sent:
        found = pickle.loads(sent)
        assert vars(found).keys() == ModelRunnerOutput.__dataclass_fields__.keys()
        assert pickle.dumps(found) == pickle.dumps(ModelRunnerOutput(**vars(copy.copy(found))))
    # vLLM's shared empty output is never written to.
    affected = scheduler.AffectedRequest("i", 0, "reason")
    failed = scheduler.FailedStep({"r": affected}, frozenset("i"))
    marked = scheduler.attach(EMPTY_MODEL_RUNNER_OUTPUT, failed)
    assert getattr(pickle.loads(pickle.dumps(marked)), scheduler.FIELD) == failed
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, scheduler.FIELD)


def check_failures_elsewhere_stay_fatal(hf_config: Any) -> None:
    """Where another rank answers, or rows may have been copied away, the exception is raised."""
    for change in ("pipeline", "kv", "ec", "text"):
        engine = Engine(hf_config, "v1", 1.0)
        config = engine.scheduler.vllm_config
        assert ranks.isolated(config)
        if change == "pipeline":
            config.parallel_config.world_size = 2
        elif change == "text":
            config.model_config.hf_config = rig_scheduling.TEXT
        else:
            setattr(config, f"{change}_transfer_config", object())
        assert not ranks.isolated(config)
        engine.add("a", [1.0])
        try:
            engine.run()
        except RuntimeError as error:
            assert "broke the tower" in str(error)
        else:
            raise AssertionError(f"swallowed: {change}")
