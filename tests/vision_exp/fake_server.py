"""A local stand-in for a vision server that can be given faults, to try the validator on.

It reads the pictures of a request and answers the validator's questions from their pixels, counts
prompt tokens by the released layout, and refuses what a Vision-Exp server refuses.
"""

from __future__ import annotations

import base64
import io
import json
import random
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

from vision_exp import validate_pictures, validate_taken
from vision_exp.layout import leading_pads

FAULTS = {
    "collapsed y": "positions in a picture",
    "pictures mixed up": "each request its own picture",
    "no leading pads": "one picture at every offset",
    "twin shares a block": "the same picture twice",
    "order ignored": "pictures in another order",
    "stale prefix": "a prefix fork",
    "cancel breaks": "a cancelled request",
    "error in the stream": "a cancelled request",
    "reply not streamed": "a cancelled request",
    "bad image is 500": "a bad image, then a good one",
    "system image taken": "a picture in a system message",
    "wide refused": "pictures of all shapes",
    "wrong length": "pictures of all shapes",
    "no CMYK": "formats and colour modes",
}
#: Faults that no single check is there to find.
OTHER_FAULTS = {
    "company moves chances": "beside another request, other log-probabilities of the same word",
    "short streams": "streamed answers are complete at once",
    "no prefill": "the first token comes at once",
    "few alternatives": "no more than five alternatives a token",
    "strict": "no fields but OpenAI's",
    "no model": "/models lists none",
    "paths count": "nothing is served outside /v1",
    "no usage": "replies without usage",
    "no choices": "replies with no choices",
    "no JSON": "replies in HTML",
}
#: How a stand-in answers, other than sense: the server's repeats, its pictures, its reasoning.
MINDS = {
    "letters": "one of four letters at random, nothing else",
    "letters with chances": "a random letter each time, with random log-probabilities",
    "noisy": "random weights: log-probabilities of the prompt, moving by 0.2 nats each time",
    "noisy and blind": "the same, but the pictures do not matter",
    "exact and blind": "the same, without any movement",
    "empty": "content null, nothing else",
    "thinks": "reasoning in place of content, unless asked not to think",
    "always thinks": "reasoning in place of content, whatever it is asked",
}
TOKENS = [chr(letter) for letter in range(ord("A"), ord("z") + 1)]


@dataclass(frozen=True)
class Said:
    """What is answered: ``chances`` has one dict per token, text -> log-probability."""

    text: str | None
    length: int
    chances: tuple[dict[str, float], ...] = ()
    reasoning: str | None = None

    def choice(self, alternatives: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.text, "reasoning": self.reasoning}
        listed = []
        for chances in self.chances:
            ranked = sorted(chances.items(), key=lambda item: -item[1])[:alternatives]
            top = [{"token": token, "logprob": chance} for token, chance in ranked]
            listed.append(top[0] | {"top_logprobs": top})
        return {
            "message": message,
            "finish_reason": "stop",
            "logprobs": {"content": listed} if alternatives and listed else None,
        }


class Failure(Exception):
    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Brain:
    """State of the stand-in: its fault, whether it answers sense, the requests it is inside of."""

    def __init__(self, fault: str, trained: bool, mind: str) -> None:
        if fault not in ("", *FAULTS, *OTHER_FAULTS) or mind not in ("", *MINDS):
            raise ValueError(f"no such fault or mind: {fault!r}, {mind!r}")
        self.fault, self.trained, self.mind = fault, trained, mind
        self.random = random.Random(7)
        self.lock = threading.Lock()
        self.inside: list[Image.Image] = []
        self.broken = self.crowded = False
        self.visitors = 0
        self.block = validate_taken.expected_tokens()

    def answer(self, body: dict[str, Any]) -> Said:
        self.look_at_fields(body)
        parts = [part for message in body["messages"] for part in _parts(message)]
        if self.fault != "system image taken":
            for message in body["messages"]:
                if message["role"] != "user" and any(p["type"] != "text" for p in _parts(message)):
                    raise Failure(400, "images belong to user messages")
        images = [self.picture(part) for part in parts if part["type"] == "image_url"]
        text = "\n\n".join(part["text"] for part in parts if part["type"] == "text")
        length = self.length(parts, images)
        if self.fault == "pictures mixed up" and images:
            images = self.someone_elses(images)
        if self.mind.startswith(("letters", "noisy", "exact")):
            return self.random_words(text, images, length, body["max_tokens"])
        if self.mind == "empty":
            return Said(None, length)
        if not self.trained:
            return Said(f"{hash(json.dumps(parts)) % 10**8:08}", length)
        asked = body.get("chat_template_kwargs", {"thinking": True})
        if "thinks" in self.mind and (self.mind == "always thinks" or asked["thinking"]):
            return Said(None, length, reasoning=f"Let me see the {len(images)} pictures")
        text = self.sense(text, images, body)
        if self.fault == "company moves chances":
            # The likeliest word stays the likeliest.
            beside = -0.1 if self.company() else -5.0
            return Said(text, length, ({text: -0.05, "mauve": beside},))
        return Said(text, length)

    def look_at_fields(self, body: dict[str, Any]) -> None:
        if self.fault == "few alternatives" and body.get("top_logprobs", 0) > 5:
            raise Failure(400, "top_logprobs is at most 5")
        known = {"model", "messages", "max_tokens", "temperature", "stream", "logprobs"}
        if self.fault == "strict" and (unknown := set(body) - known - {"top_logprobs"}):
            raise Failure(422, f"unknown fields {unknown}")

    def random_words(self, text: str, images: list[Image.Image], length: int, most: int) -> Said:
        """Some letters, each likely or not by what came before it."""
        if self.mind == "letters":
            return Said(self.random.choice("ABCD"), length)
        blind = "blind" in self.mind
        said, chances = "", []
        for _ in range(min(most, 4)):
            seen = "" if blind else [zlib.crc32(image.tobytes()) for image in images]
            if self.mind == "letters with chances":
                known, moving = self.random, 0.0
            else:
                known, moving = random.Random(f"{text} {seen} {said}"), 0.2
            if self.mind.startswith("exact"):
                moving = 0.0
            scores = [known.gauss(0, 3) + self.random.gauss(0, moving) for _ in TOKENS]
            total = float(np.log(np.sum(np.exp(scores))))
            chances.append({t: s - total for t, s in zip(TOKENS, scores, strict=True)})
            said += max(chances[-1], key=chances[-1].__getitem__)
        return Said(said, length, tuple(chances))

    def company(self) -> bool:
        """Whether another request is being answered now."""
        with self.lock:
            self.visitors += 1
        time.sleep(0.1)
        with self.lock:
            self.crowded = self.crowded or self.visitors > 1
            crowded = self.crowded
        time.sleep(0.05)
        with self.lock:
            self.visitors -= 1
            self.crowded = self.crowded and self.visitors > 0
        return crowded

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
def serving(fault: str = "", *, trained: bool = True, mind: str = "") -> Iterator[str]:
    """The base URL of a stand-in, while the block runs."""
    brain = Brain(fault, trained, mind)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if brain.fault == "paths count" and not self.path.startswith("/v1/"):
                self.reply(404, {"detail": "Not Found"})
                return
            names = [{"id": "stand-in"}]
            self.reply(200, {"data": [] if brain.fault == "no model" else names})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                said = brain.answer(body)
            except Failure as error:
                self.reply(error.status, {"error": str(error)})
                return
            if body.get("stream") and brain.fault != "reply not streamed":
                self.stream()
                return
            choice = said.choice(body.get("top_logprobs", 0))
            reply = {"choices": [choice], "usage": {"prompt_tokens": said.length}}
            if brain.fault == "no usage":
                del reply["usage"]
            if brain.fault == "no choices":
                reply["choices"] = []
            self.reply(200, "<html>" if brain.fault == "no JSON" else reply)

        def stream(self) -> None:
            brain.broken = brain.fault == "cancel breaks"
            self.send_response(200)
            self.end_headers()
            if brain.fault == "error in the stream":
                self.wfile.write(b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n')
                return
            pieces = 2 if brain.fault == "short streams" else 100
            try:
                self.piece({"role": "assistant", "content": ""})
                time.sleep(0 if brain.fault == "no prefill" else 0.1)
                for _ in range(pieces):
                    self.piece({"content": "white "})
                    time.sleep(0 if brain.fault == "short streams" else 0.01)
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                return

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
