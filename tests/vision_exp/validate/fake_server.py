"""A local stand-in for a vision server that can be given faults, to try the validator on."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fake_model import Failure, Model

from vision_exp.validate import images

NAME = "stand-in"
#: Faults of the server before its model gets a request.
BEFORE_THE_MODEL = ("images dropped", "images unseen", "unaccepted images lost")


def spoil(body: dict[str, Any], drop: bool) -> None:
    """Drops every image of a request, or puts the same one in the place of each."""
    for message in body["messages"]:
        if isinstance(parts := message["content"], list):
            shown = [part for part in parts if part["type"] == "image_url"]
            message["content"] = [part for part in parts if part not in shown]
            message["content"] += (
                [] if drop else [images.part(images.disc("red", 0)) for _ in shown]
            )


def metrics(model: Model) -> str:
    """In the text that vLLM writes for Prometheus, of two engines."""
    values = {"running": model.streams, "waiting": int(model.fault == "never at rest")}
    names = {f"num_requests_{name}": value for name, value in values.items()}
    names |= {"kv_cache_usage_perc": model.streams / 64, "mm_cache_queries_total": 9}
    lines = [
        f'vllm:{name}{{engine="{engine}",model_name="a{{}} b"}} {float(value if engine else 0)}'
        for name, value in names.items()
        for engine in (0, 1)
    ]
    return "\n".join(["# TYPE x gauge", *([] if model.fault == "no gauges" else lines), ""])


@contextmanager
def serving(
    fault: str = "", *, trained: bool = True, mind: str = "", name: str = NAME
) -> Iterator[str]:
    """The base URL of a stand-in, while the block runs; ``name`` is its model's."""
    model = Model("" if fault in BEFORE_THE_MODEL else fault, trained, mind)

    lost: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if model.fault == "paths count" and not self.path.startswith("/v1/"):
                self.reply(404, {"detail": "Not Found"})
                return
            if self.path == "/metrics":
                self.reply(200, metrics(model))
                return
            names = [{"id": name}]
            self.reply(200, {"data": [] if model.fault == "no model" else names})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            shown = set(re.findall(r"[A-Za-z0-9+/=]{200,}", json.dumps(body)))
            if unaccepted := self.path.endswith("count_tokens") or body.get("temperature", 0) < 0:
                lost.update(shown)
            if fault == "unaccepted images lost" and not unaccepted and shown & lost:
                self.reply(500, {"error": "expected a cached item"})
                return
            if unaccepted:
                refused = not self.path.endswith("count_tokens")
                self.reply(400 if refused else 200, {"input_tokens": 9})
                return
            if fault in ("images dropped", "images unseen"):
                spoil(body, drop=fault == "images dropped")
            try:
                answer = model.answer(body)
            except Failure as error:
                self.reply(error.status, {"error": error.words})
                return
            if body.get("stream") and model.fault != "reply not streamed":
                self.stream()
                return
            choice = answer.choice(body.get("top_logprobs", 0))
            reply = {"choices": [choice], "usage": {"prompt_tokens": answer.length}}
            if model.fault == "no usage":
                del reply["usage"]
            if model.fault == "no choices":
                reply["choices"] = []
            self.reply(200, "<html>" if model.fault == "no JSON" else reply)

        def stream(self) -> None:
            model.broken = model.fault == "cancel breaks"
            self.send_response(200)
            self.end_headers()
            if model.fault == "error in the stream":
                self.wfile.write(b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n')
                return
            pieces = 2 if model.fault == "short streams" else 100
            model.streams += 1
            try:
                self.piece({"role": "assistant", "content": ""})
                time.sleep(0 if model.fault == "no prefill" else 0.3)
                for _ in range(pieces):
                    self.piece({"content": "white "})
                    if model.fault == "stream cut off":
                        return
                    time.sleep(0 if model.fault == "short streams" else 0.01)
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                model.streams += model.fault == "cancelled requests run on"
            finally:
                model.streams -= 1

        def piece(self, delta: dict[str, Any]) -> None:
            event = {"choices": [{"delta": delta, "finish_reason": None}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        def reply(self, status: int, content: dict[str, Any] | str) -> None:
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
