"""A local stand-in for a vision server that can be given faults, to try the validator on.

It reads the pictures of a request and answers the validator's questions from their pixels, counts
prompt tokens by the released layout, and refuses what a Vision-Exp server refuses.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

from vision_exp import validate_checks, validate_pictures
from vision_exp.layout import leading_pads

FAULTS = {
    "collapsed y": "positions in a picture",
    "pictures mixed up": "each request its own picture",
    "no leading pads": "one picture at every offset",
    "twin shares a block": "the same picture twice",
    "order ignored": "pictures in another order",
    "stale prefix": "a prefix fork",
    "cancel breaks": "a cancelled request",
    "bad image is 500": "a bad image, then a good one",
    "system image taken": "a picture in a system message",
    "wide refused": "pictures of all shapes",
    "wrong length": "pictures of all shapes",
    "no CMYK": "formats and colour modes",
}


class Failure(Exception):
    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Brain:
    """State of the stand-in: its fault, whether it answers sense, the requests it is inside of."""

    def __init__(self, fault: str, trained: bool) -> None:
        self.fault, self.trained = fault, trained
        self.lock = threading.Lock()
        self.inside: list[Image.Image] = []
        self.broken = False
        self.block = validate_checks._expected_tokens()

    def answer(self, body: dict[str, Any]) -> tuple[str, int]:
        parts = [part for message in body["messages"] for part in _parts(message)]
        if self.fault != "system image taken":
            for message in body["messages"]:
                if message["role"] != "user" and any(p["type"] != "text" for p in _parts(message)):
                    raise Failure(400, "images belong to user messages")
        images = [self.picture(part) for part in parts if part["type"] == "image_url"]
        text = "\n\n".join(part["text"] for part in parts if part["type"] == "text")
        length = self.length(parts, images)
        if not self.trained:
            return f"{hash(json.dumps(parts)) % 10**8:08}", length
        return self.sense(text, images, body), length

    def picture(self, part: dict[str, Any]) -> Image.Image:
        data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
        try:
            image = Image.open(io.BytesIO(data))
            image.load()
        except (OSError, SyntaxError) as error:
            raise Failure(500 if self.fault == "bad image is 500" else 400, str(error)) from error
        if self.fault == "no CMYK" and image.mode == "CMYK":
            raise Failure(400, "mode CMYK")
        if self.fault == "wide refused" and image.width > 8 * image.height:
            raise Failure(400, "too wide")
        return image

    def length(self, parts: list[dict[str, Any]], images: list[Image.Image]) -> int:
        position, queue, seen = 5, list(images), set()
        for part in parts:
            if part["type"] == "text":
                position += len(part["text"].split()) + 1
                continue
            image = queue.pop(0)
            key = image.tobytes()
            if self.fault == "twin shares a block" and key in seen:
                continue
            seen.add(key)
            block = self.block(image.width, image.height)
            block += 40 if self.fault == "wrong length" else 0
            pads = 0 if self.fault == "no leading pads" else leading_pads(position)
            position += block + pads
        return position

    def sense(self, text: str, images: list[Image.Image], body: dict[str, Any]) -> str:
        for question, word in {"2 + 3": "5", "France": "Paris"}.items():
            if question in text:
                return word
        if self.fault == "pictures mixed up" and images:
            images = self.someone_elses(images)
        if self.broken or (self.fault == "stale prefix" and "Study" in text and _warm(body)):
            return "Purple"
        if "two whole numbers" in text:
            x, y = _red_place(images[0])
            return f"{x:.0f} {50 + (y - 50) * (0.29 if self.fault == 'collapsed y' else 1):.0f}"
        if "order" in text and self.fault == "order ignored":
            return ", ".join(sorted(_colour(image) for image in images))
        return ", ".join(_colour(image) for image in images) or "Hello"

    def someone_elses(self, images: list[Image.Image]) -> list[Image.Image]:
        with self.lock:
            self.inside.append(images[0])
        time.sleep(0.05)
        with self.lock:
            other = [self.inside[0]]
        time.sleep(0.05)
        with self.lock:
            self.inside.remove(images[0])
        return other


def _warm(body: dict[str, Any]) -> bool:
    return "cache_salt" not in body


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _colour(image: Image.Image) -> str:
    pixel = image.convert("RGB").getpixel((image.width // 2, image.height // 2))
    distance = {
        name: sum((a - b) ** 2 for a, b in zip(pixel, colour, strict=True))
        for name, colour in validate_pictures.COLOURS.items()
    }
    return min(distance, key=distance.__getitem__)


def _red_place(image: Image.Image) -> tuple[float, float]:
    pixels = np.asarray(image.convert("RGB")).astype(int)
    rows, columns = np.nonzero(pixels[..., 0] - pixels[..., 1] > 90)
    return 100 * columns.mean() / image.width, 100 * rows.mean() / image.height


@contextmanager
def serving(fault: str = "", *, trained: bool = True) -> Iterator[str]:
    """The base URL of a stand-in, while the block runs."""
    brain = Brain(fault, trained)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "stand-in"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                text, length = brain.answer(body)
            except Failure as error:
                self.reply(error.status, {"error": str(error)})
                return
            if body.get("stream"):
                self.stream()
                return
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            self.reply(200, {"choices": [choice], "usage": {"prompt_tokens": length}})

        def stream(self) -> None:
            brain.broken = brain.fault == "cancel breaks"
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(100):
                    self.wfile.write(b"data: {}\n\n")
                    time.sleep(0.01)
            except OSError:
                return

        def reply(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
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
