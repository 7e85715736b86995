"""Random sequences of requests on the vLLM release that is first on PYTHONPATH (sequences.py).

Takes how many on each kind of server: `lru=15 shm=15 none=2 several=2`. `none` has caches of size
0; `several` is one of several API servers; `ranks` has two engines (internal data parallelism);
`offline` is `LLM`, with checks of its own.

Prints one JSON object as its last line: kind -> null, or the traceback.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.update(
    PYTHONHASHSEED="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_HOST_IP="127.0.0.1",
    GLOO_SOCKET_IFNAME="lo",
)

import failed_answers
import rig_chat as rig
import rig_server
import sequences

#: Sample images that a cache has room for: fewer than a prompt may have.
ROOM = 2.5


def check_no_second_cache(folder: Path) -> None:
    """Two engines behind one API server: vLLM makes no cache in them, and so we mirror none."""
    from vllm.multimodal import MULTIMODAL_REGISTRY as REGISTRY

    for kind in ("lru", "shm"):
        config = rig_server.config(folder, ROOM, kind, data_parallel_size=2)
        assert REGISTRY.engine_receiver_cache_from_config(config) is None
        assert REGISTRY.worker_receiver_cache_from_config(config, None) is None
        assert REGISTRY.processor_cache_from_config(config).sender is None


def run(folder: Path, kind: str, count: int) -> None:
    if kind == "offline":
        failed_answers.check_offline(folder)
        return
    cached = kind if kind in ("lru", "shm") else "lru"
    more = {"data_parallel_size": 2} if kind == "ranks" else {}
    config = rig_server.config(folder, 0 if kind == "none" else ROOM, cached, **more)
    if kind == "several":
        check_no_second_cache(folder)
        config.parallel_config._api_process_count = 2
    with rig_server.running(config) as server:
        sequences.check_each(server)
        if kind == "lru":
            sequences.check_metrics(server)
        failed_answers.check_apis(server)
        sequences.run(server, count)
        if kind == "ranks":
            sequences.check_ranks(server)


def main() -> None:
    rig.hook_config()
    import vllm.models.deepseek_v4.nvidia.model
    import vllm.v1.engine.core  # noqa: F401

    results: dict[str, str | None] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for argument in sys.argv[1:]:
            kind, _, count = argument.partition("=")
            start = time.monotonic()
            try:
                run(Path(name), kind, int(count))
                results[kind] = None
            except BaseException:  # noqa: BLE001 - reported as this kind's result
                results[kind] = traceback.format_exc()[-4000:]
            seconds[kind] = round(time.monotonic() - start, 1)
    print(json.dumps({"results": results, "seconds": seconds}))


if __name__ == "__main__":
    main()
