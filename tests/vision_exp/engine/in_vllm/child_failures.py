"""Failing images on the release that is first on PYTHONPATH: with workers, then in one process.

Real in the scenarios: vLLM's engine core, scheduler, MultiprocExecutor, message queues, two worker
processes, their tensor-parallel group. The worker is worker_failures.py. Each scenario has an
engine of its own in a forked process; the checks of checks_failures.py follow.

Prints one JSON object as its last line: name -> null, or the traceback.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))
sys.path.insert(0, str(Path(__file__).parent))
os.environ.update(
    PYTHONHASHSEED="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS="1",
    VLLM_HOST_IP="127.0.0.1",
    GLOO_SOCKET_IFNAME="lo",
)

import checks_failures
import rig_chat as rig
import tiny_config
import tiny_requests
import tiny_tokenizer

from vision_exp.engine.failures import ranks as failed_ranks

BOTH = [0, 1]
LONG = {"seed": 1, "before": 300, "after": 300}  # a full block behind each picture


def engine_config(folder: Path, mode: str, ranks: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder),
        max_model_len=2048,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 4},
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        worker_cls="worker_failures.Worker",
        mm_encoder_tp_mode=mode,
    ).create_engine_config()


class Engine:
    """One engine, with two worker processes or (`ranks=1`) with its worker in this one."""

    def __init__(
        self, folder: Path, *, kind: str, later: bool, mode: str = "weights", ranks: int = 2
    ) -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        config = engine_config(folder, mode, ranks)
        # vLLM's CPU platform asks for new interpreters, which would import vLLM again.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        # Off on vLLM's CPU platform; nothing here depends on it.
        config.scheduler_config.async_scheduling = later
        config.cache_config.enable_prefix_caching = True
        os.environ["FAILURES_RUNNER"] = kind
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(kind == "v2"))
        assert config.use_v2_model_runner is (kind == "v2")
        executor = MultiprocExecutor if ranks > 1 else UniProcExecutor
        self.core = EngineCore(config, executor, log_stats=False)
        assert (self.core.batch_queue is not None) is later
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.reasons: dict[str, Any] = {}

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.core.model_executor.collective_rpc(method, args=args)

    def add(self, name: str, pictures: Sequence[float] = (), **options: Any) -> None:
        hasher = self.core.request_block_hasher
        self.core.add_request(tiny_requests.request(name, pictures, hasher, **options))

    def run(self) -> dict[str, str]:
        """How the requests since the last call ended."""
        self.ends = {}
        for _ in range(100):
            if not self.core.scheduler.has_unfinished_requests() and not self.core.batch_queue:
                return self.ends
            for done in (self.core.step_fn()[0] or {}).values():
                for one in done.outputs:
                    self.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
                    if one.finish_reason is not None:
                        self.ends[one.request_id] = str(one.finish_reason)
                        self.reasons[one.request_id] = one.stop_reason
        raise AssertionError(f"still running: {list(self.core.scheduler.requests)}")

    def hit(self, pictures: Sequence[float], **options: Any) -> int:
        """Tokens that the prefix cache has for a prompt."""
        prompt = tiny_requests.request("h", pictures, self.core.request_block_hasher, **options)
        return self.core.scheduler.kv_cache_manager.get_computed_blocks(prompt)[1]

    def alone(self, pictures: Sequence[float] = (), **options: Any) -> list[int]:
        """Tokens of a request that runs by itself and finds nothing in the prefix cache."""
        assert self.core.scheduler.reset_prefix_cache()
        self.tokens.pop("alone", None)
        self.add("alone", pictures, **options)
        assert self.run() == {"alone": "length"}
        return self.tokens["alone"]


def isolated(engine: Engine) -> None:
    """A picture that fails on both ranks ends its request; what is beside and after it is right."""
    engine.call("set_broken", {2.0: BOTH})
    engine.add("good", [1.0, 3.0])
    engine.add("bad", [4.0, 2.0], **LONG)
    engine.add("text", seed=2)
    assert engine.run() == {"good": "length", "bad": "error", "text": "length"}
    assert engine.tokens["bad"] == [] and "picture 2.0 broke" in engine.reasons["bad"]
    assert set(engine.core.scheduler.encoder_cache_manager.cached) == {"1.0", "3.0", "4.0"}
    # What lies before the failed picture is found again; then it fails once more.
    assert engine.hit([4.0, 2.0], **LONG) == 512
    engine.add("again", [4.0, 2.0], **LONG)
    assert engine.run() == {"again": "error"}
    engine.call("set_broken", {})
    engine.add("cured", [4.0, 2.0], **LONG)
    engine.add("other", [2.0, 3.0], seed=3)
    assert engine.run() == {"cured": "length", "other": "length"}
    assert engine.hit([4.0, 2.0], **LONG) == 768
    for rank in engine.call("seen"):
        assert rank["rows"]["2.0"] == 2.0, rank
    assert engine.tokens["good"] == engine.alone([1.0, 3.0])
    assert engine.tokens["text"] == engine.alone(seed=2)
    assert engine.tokens["cured"] == engine.alone([4.0, 2.0], **LONG)
    assert engine.tokens["other"] == engine.alone([2.0, 3.0], seed=3)


def fatal(engine: Engine, ranks: list[int], error: type[Exception], words: str) -> None:
    """A picture that fails on one rank of a shared tower stops the engine, and soon."""
    engine.call("set_broken", {2.0: ranks})
    engine.add("bad", [2.0])
    start = time.monotonic()
    try:
        engine.run()
    except error as found:
        assert words in str(found), found
        assert time.monotonic() - start < 20
    else:
        raise AssertionError("went on")


def scenarios(folder: Path) -> dict[str, Callable[[], None]]:
    def with_engine(check: Callable[..., None], *args: Any, **options: Any) -> None:
        engine = Engine(folder, **options)
        try:
            check(engine, *args)
        finally:
            engine.core.model_executor.shutdown()

    def on(kind: str, *args: Any, **options: Any) -> Callable[[], None]:
        def run() -> None:
            # How long the executor waits for a rank; vLLM reads it once.
            seconds = "4" if args[0] is fatal else "60"
            os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = seconds
            with_engine(*args, kind=kind, **options)

        return run

    return {
        "v1": on("v1", isolated, later=False),
        "v1 asynchronous": on("v1", isolated, later=True),
        "v2 asynchronous": on("v2", isolated, later=True),
        "v2, images spread over ranks": on("v2", isolated, later=False, mode="data"),
        "one process": on("v1", isolated, later=False, ranks=1),
        "first rank alone": on("v2", fatal, [0], RuntimeError, "picture 2.0 broke", later=True),
        "second rank alone": on("v1", fatal, [1], TimeoutError, "timed out", later=False),
    }


def in_fork(check: Callable[[], None], seconds: float) -> str | None:
    """Run `check` in a process group of its own; the traceback if it fails or takes too long."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.setpgid(0, 0)
        # Names the ranks' shared memory, so that the parent can remove what a killed one leaves.
        os.environ["VLLM_DIST_IDENT"] = f"failures-{os.getpid()}"
        faulthandler.dump_traceback_later(seconds - 1)
        said = b""
        try:
            check()
        except BaseException:  # noqa: BLE001 - reported by the parent
            said = traceback.format_exc()[-4000:].encode()
        os.write(write, said)
        os._exit(1 if said else 0)
    os.close(write)
    limit = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > limit:
            break
        time.sleep(0.02)
    else:
        limit = 0.0
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # workers that a fatal error left behind
    for left in Path("/dev/shm").glob(f"*failures-{pid}-*"):
        left.unlink()
    if limit:
        os.waitpid(pid, 0)
        return f"still running after {seconds} s"
    with os.fdopen(read) as pipe:
        return pipe.read() or None


def main() -> None:
    rig.hook_config()
    chosen = sys.argv[1:]
    results: dict[str, str | None] = {}
    seconds: dict[str, float] = {}

    def run(name: str, check: Callable[[], str | None]) -> None:
        if not chosen or name in chosen:
            start = time.monotonic()
            results[name] = check()
            seconds[name] = round(time.monotonic() - start, 1)

    with tempfile.TemporaryDirectory() as name:
        folder = tiny_config.write(Path(name, "vision"))
        tiny_tokenizer.write(folder)
        import vllm.models.deepseek_v4.nvidia.model
        import vllm.v1.engine.core  # noqa: F401
        import worker_failures  # noqa: F401

        start = time.monotonic()
        config = engine_config(folder, "weights", 2)  # inspects the model class, for all forks
        seconds["set-up"] = round(time.monotonic() - start, 1)
        kept, failed_ranks.BARRIER_TIMEOUT_S = failed_ranks.BARRIER_TIMEOUT_S, 1.0
        for name, scenario in scenarios(folder).items():
            run(name, lambda scenario=scenario: in_fork(scenario, 90))  # type: ignore[misc]
        failed_ranks.BARRIER_TIMEOUT_S = kept
        for name, check in vars(checks_failures).items():
            if name.startswith("check_"):
                run(name, lambda check=check: in_process(check, config))  # type: ignore[misc]
    print(json.dumps({"results": results, "seconds": seconds}))


def in_process(check: Callable[[Any], None], config: Any) -> str | None:
    try:
        check(config.model_config.hf_config)
    except Exception:  # noqa: BLE001 - reported as this check's result
        return traceback.format_exc()[-4000:]
    return None


if __name__ == "__main__":
    main()
