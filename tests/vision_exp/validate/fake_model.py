"""What `fake_server` answers, and the faults that it can be given.

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
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageColor

from vision_exp.layout import leading_pads
from vision_exp.preview import unpadded_length
from vision_exp.validate import images

FAULTS = {
    "collapsed y": "positions in an image",
    "pictures mixed up": "each request its own image",
    "every colour named": "each request its own image",
    "no leading pads": "one image at every offset",
    "twin shares a block": "the same image twice",
    "nothing counted": "the same image twice",
    "order ignored": "images in another order",
    "stale prefix": "a prefix fork",
    "cancel breaks": "a cancelled request",
    "error in the stream": "a cancelled request",
    "reply not streamed": "a cancelled request",
    "stream cut off": "a cancelled request",
    "cancelled requests run on": "what cancelled requests leave",
    "bad image is 500": "a bad image, then a good one",
    "system image taken": "an image in a system message",
    "wide refused": "images of all shapes",
    "wrong length": "images of all shapes",
    "no CMYK": "formats and colour modes",
    "right side unseen": "positions in an image",
}
#: Faults that no single check is there to find.
OTHER_FAULTS = {
    "co-batching moves chances": "beside another request, other log-probabilities of the same word",
    "hangs when co-batched": "no answer while another request is there",
    "salt ignored": "answers are taken from the cache of a prefix, whatever cache_salt says",
    "no pictures": "a picture is refused, as by a text model",
    "pictures break": "a picture is an error of the server",
    "busy": "HTTP 429",
    "busy when co-batched": "HTTP 429 while another request is there",
    "busy at last": "HTTP 429 from when BUSY is set",
    "wordy": "right answers in sentences, with other words that have a colour's letters in them",
    "short streams": "streamed answers are complete at once",
    "no prefill": "the first token comes at once",
    "few alternatives": "no more than five alternatives a token",
    "strict": "no fields but OpenAI's",
    "no gauges": "/metrics has none of vLLM's",
    "never at rest": "another client's request waits all the time",
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
FRENCH = dict(zip(images.COLOURS, ["rouge", "vert", "bleu", "jaune", "noir", "blanc"], strict=True))
#: HANGING: set once a request hangs when co-batched. BUSY: set by a test.
HANGING, BUSY = threading.Event(), threading.Event()
#: Seconds within which requests that were sent together arrive, on a busy machine too.
MEETING = 0.15
TOKENS = [chr(letter) for letter in range(ord("A"), ord("z") + 1)]


@dataclass(frozen=True)
class Reply:
    """``chances`` has one dict per token, text -> log-probability."""

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


@dataclass
class Failure(Exception):
    status: int
    words: str


class Model:
    """State of the stand-in: its fault, whether it answers sense, the requests it is inside of."""

    def __init__(self, fault: str, trained: bool, mind: str) -> None:
        if fault not in ("", *FAULTS, *OTHER_FAULTS) or mind not in ("", *MINDS):
            raise ValueError(f"no such fault or mind: {fault!r}, {mind!r}")
        self.fault, self.trained, self.mind = fault, trained, mind
        self.random = random.Random(7)
        self.lock = threading.Lock()
        self.inside: list[Image.Image] = []
        self.broken, self.crowded, self.visitors, self.streams = False, False, 0, 0
        self.cache: dict[str, str] = {}

    def answer(self, body: dict[str, Any]) -> Reply:
        self.look_at_fields(body)
        parts = [part for message in body["messages"] for part in _parts(message)]
        if self.fault != "system image taken":
            for message in body["messages"]:
                if message["role"] != "user" and any(p["type"] != "text" for p in _parts(message)):
                    raise Failure(400, "images belong to user messages")
        images = [self.picture(part) for part in parts if part["type"] == "image_url"]
        if self.fault == "hangs when co-batched" and self.is_cobatched():
            HANGING.set()
            time.sleep(60)
        text = "\n\n".join(part["text"] for part in parts if part["type"] == "text")
        length = 0 if self.fault == "nothing counted" else self.length(parts, images)
        if self.fault == "pictures mixed up" and images:
            images = self.someone_elses(images)
        if self.mind.startswith(("letters", "noisy", "exact")):
            return self.random_words(text, images, length, body["max_tokens"])
        if self.mind == "empty":
            return Reply(None, length)
        if not self.trained:
            return Reply(f"{hash(json.dumps(parts)) % 10**8:08}", length)
        asked = body.get("chat_template_kwargs", {"thinking": True})
        if "thinks" in self.mind and (self.mind == "always thinks" or asked["thinking"]):
            return Reply(None, length, reasoning=f"Let me see the {len(images)} pictures")
        text = self.sense(text, images, body)
        if self.fault == "co-batching moves chances":
            # The likeliest word stays the likeliest.
            beside = -0.1 if self.is_cobatched() else -5.0
            return Reply(text, length, ({text: -0.05, "mauve": beside},))
        return Reply(text, length)

    def look_at_fields(self, body: dict[str, Any]) -> None:
        busy = {"busy": True, "busy at last": BUSY.is_set()}
        if busy.get(self.fault) or (self.fault == "busy when co-batched" and self.is_cobatched()):
            raise Failure(429, "slow down")
        if self.fault == "few alternatives" and body.get("top_logprobs", 0) > 5:
            raise Failure(400, "top_logprobs is at most 5")
        known = {"model", "messages", "max_tokens", "temperature", "stream", "logprobs"}
        if self.fault == "strict" and (unknown := set(body) - known - {"top_logprobs"}):
            raise Failure(422, f"unknown fields {unknown}")

    def random_words(self, text: str, images: list[Image.Image], length: int, most: int) -> Reply:
        """Some letters, each likely or not by what came before it."""
        if self.mind == "letters":
            return Reply(self.random.choice("ABCD"), length)
        blind = "blind" in self.mind
        words, chances = "", []
        for _ in range(min(most, 4)):
            seen = "" if blind else [zlib.crc32(image.tobytes()) for image in images]
            if self.mind == "letters with chances":
                known, moving = self.random, 0.0
            else:
                known, moving = random.Random(f"{text} {seen} {words}"), 0.2
            if self.mind.startswith("exact"):
                moving = 0.0
            scores = [known.gauss(0, 3) + self.random.gauss(0, moving) for _ in TOKENS]
            total = float(np.log(np.sum(np.exp(scores))))
            chances.append({t: s - total for t, s in zip(TOKENS, scores, strict=True)})
            words += max(chances[-1], key=chances[-1].__getitem__)
        return Reply(words, length, tuple(chances))

    def is_cobatched(self) -> bool:
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
        if self.fault in ("no pictures", "pictures break"):
            status = 400 if self.fault == "no pictures" else 500
            raise Failure(status, "At most 0 image(s) may be provided in one prompt.")
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
            block = unpadded_length(image.width, image.height)
            block += 40 if self.fault == "wrong length" else 0
            pads = 0 if self.fault == "no leading pads" else leading_pads(position)
            position += block + pads
        return position

    def sense(self, text: str, images: list[Image.Image], body: dict[str, Any]) -> str:
        for question, word in {"2 + 3": "5", "France": "Paris"}.items():
            if question in text:
                return word
        if self.broken or (
            self.fault == "stale prefix" and "Study" in text and "cache_salt" not in body
        ):
            return "Purple"
        if "two whole numbers" in text:
            x, y = _red_place(images[0])
            if self.fault == "right side unseen" and x > 80:
                return "I cannot see a red disc"
            return f"{x:.0f} {50 + (y - 50) * (0.29 if self.fault == 'collapsed y' else 1):.0f}"
        colours = [_colour(image) for image in images]
        if self.fault == "salt ignored" and "Study" in text:
            answer = self.named(colours, text)
            return self.cache.setdefault(f"{text[:100]} {colours}", answer)
        return self.named(colours, text)

    def named(self, colours: list[str], text: str) -> str:
        if self.fault == "every colour named":
            colours = list(images.COLOURS)
        if "order" in text and self.fault == "order ignored":
            colours = sorted(colours)
        if "French" in text:
            return ", ".join(FRENCH[colour] for colour in colours)
        if self.fault == "wordy" and len(colours) == 1:
            return f"{colours[0].title()}. I considered it: the disc is {colours[0].upper()}."
        if self.fault == "wordy" and colours:
            return f"The coloured discs are {', '.join(colours)}"
        return ", ".join(colours) or "Hello"

    def someone_elses(self, images: list[Image.Image]) -> list[Image.Image]:
        with self.lock:
            self.inside.append(images[0])
        time.sleep(MEETING)
        with self.lock:
            other = [self.inside[0]]
        time.sleep(MEETING)
        with self.lock:
            self.inside.remove(images[0])
        return other


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _colour(image: Image.Image) -> str:
    pixel = image.convert("RGB").getpixel((image.width // 2, image.height // 2))
    distance = {
        name: sum((a - b) ** 2 for a, b in zip(pixel, ImageColor.getrgb(name), strict=True))
        for name in images.COLOURS
    }
    return min(distance, key=distance.__getitem__)


def _red_place(image: Image.Image) -> tuple[float, float]:
    pixels = np.asarray(image.convert("RGB")).astype(int)
    rows, columns = np.nonzero(pixels[..., 0] - pixels[..., 1] > 90)
    return 100 * columns.mean() / image.width, 100 * rows.mean() / image.height
