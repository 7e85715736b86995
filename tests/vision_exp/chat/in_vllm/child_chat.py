"""Runs every check of chat messages on the vLLM release that is first on PYTHONPATH.

Prints one JSON object as its last line: check -> null, or the traceback.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import checks_chat_images as images
import checks_chat_random as conversations
import checks_chat_text as texts
import checks_clients as clients
import checks_http as http
import checks_items as items
import checks_offline as offline
import checks_replays as replays
import rig_chat as rig
import rig_http
import tiny_config

from vision_exp.chat import hooks


def check_rust_front_end(module: Any) -> None:
    """Refused for a vision checkpoint, and for no other. Must run before any vision config."""
    os.environ[hooks.RUST_VARIABLE] = "1"
    try:
        module.DeepseekV4Config(**tiny_config.text_config())
        for _ in range(2):
            try:
                module.DeepseekV4Config(**tiny_config.vision_config())
            except RuntimeError as error:
                assert hooks.RUST_VARIABLE in str(error)
            else:
                raise AssertionError("a vision config was accepted")
    finally:
        del os.environ[hooks.RUST_VARIABLE]


def found(*modules: ModuleType) -> dict[str, Callable[..., None]]:
    """The checks of the modules, in their order."""
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("check_")
    }


def main() -> None:
    results: dict[str, str | None] = {}
    seconds: dict[str, float] = {}

    def run(name: str, check: Callable[..., None], *args: Any) -> None:
        start = time.monotonic()
        try:
            check(*args)
            results[name] = None
        except Exception:  # noqa: BLE001 - reported as this check's result
            results[name] = traceback.format_exc()[-4000:]
        seconds[name] = round(time.monotonic() - start, 1)

    only = sys.argv[1:]
    run("check_rust_front_end", check_rust_front_end, rig.hook_config())
    with tempfile.TemporaryDirectory() as name:
        start = time.monotonic()
        server = rig.serve(Path(name, "vision"), vision=True)
        plain = rig.serve(Path(name, "text"), vision=False)
        seconds["set-up"] = round(time.monotonic() - start, 1)
        for name, check in found(texts, images, conversations, offline).items():
            if not only or name in only:
                wanted = len(inspect.signature(check).parameters)
                run(name, check, *(server, plain)[:wanted])
        over_http = {
            n: f for n, f in found(http, clients, items, replays).items() if not only or n in only
        }
        if over_http:
            start = time.monotonic()
            with rig_http.running(server) as api:
                seconds["http set-up"] = round(time.monotonic() - start, 1)
                for name, check in over_http.items():
                    run(name, check, api)
    print(json.dumps({"results": results, "seconds": seconds}))


if __name__ == "__main__":
    main()
