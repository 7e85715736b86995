"""What the checks of chat messages share: images, the real renderer, an oracle for prompts.

The oracle is the release's own text encoder. It gets the conversation with every content list
flattened as the checkpoint's encoder does (parts in order, two newlines between them), those of
tool results apart, and an image as its placeholder token.
"""

from __future__ import annotations

import base64
import copy
import importlib
import io
import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]

import tiny_config  # noqa: E402
import tiny_tokenizer  # noqa: E402
from PIL import Image  # noqa: E402

from vision_exp import install  # noqa: E402
from vision_exp.chat import reserved  # noqa: E402
from vision_exp.layout import PLACEHOLDER  # noqa: E402

LIMIT = 5
RESERVED = reserved.RESERVED_IDS
PLACEHOLDER_ID = 129264
SENTINEL = "<|place_holder_mm_span_0431|>"
SENTINEL_IDS = range(129257, 129262)


@lru_cache
def sample_image(number: int, size: tuple[int, int] = (60, 44)) -> Image.Image:
    """An image of its own colours for every number."""
    image = Image.new("RGB", size, (number * 37 % 256, number * 91 % 256, number * 17 % 256))
    image.putpixel((number % size[0], 3), (255, 255, 255))
    return image


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


def part(number: int) -> dict[str, Any]:
    """The image as clients of the HTTP API send it."""
    return {"type": "image_url", "image_url": {"url": data_url(png(sample_image(number)))}}


def pil(number: int) -> dict[str, Any]:
    """The image as offline users pass it: no encoding, so cheap enough for thousands."""
    return {"type": "image_pil", "image_pil": sample_image(number)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def hook_config() -> Any:
    """Run the config hook as the patched module does; returns the stock config module."""
    module = importlib.import_module("vllm.transformers_utils.configs.deepseek_v4")
    install.install("config", vars(module), plan="test", overlay="test")
    return module


@dataclass
class Server:
    """A renderer of a checkpoint, and its tokenizer."""

    config: Any
    renderer: Any

    @property
    def tokenizer(self) -> Any:
        return self.renderer.get_tokenizer()

    def chat(self, messages: Any, **template: Any) -> dict[str, Any]:
        """The engine input of one conversation. The request is copied, as a server gets it."""
        _, prompts = self.renderer.render_chat([copy_of(messages)], chat_params(template))
        return prompts[0]

    def prompt(self, messages: Any, **template: Any) -> dict[str, Any]:
        """What the chat renders to, images unprocessed."""
        return self.renderer.render_messages(copy_of(messages), chat_params(template))[1]

    def ids(self, prompt: dict[str, Any]) -> list[int]:
        """Token ids of a rendered prompt, by vLLM's own way of tokenising it."""
        tokenized = self.renderer.tokenize_prompt(prompt, self.renderer.default_chat_tok_params)
        return tokenized["prompt_token_ids"]

    def expected_text(self, messages: Any, image: str, **template: Any) -> str:
        """The release's own template over the flattened conversation; `image` stands for one."""
        from vllm.entrypoints.chat_utils import parse_chat_messages

        flat = [flattened(message, image) for message in copy_of(messages)]
        conversation, _, _ = parse_chat_messages(
            flat, self.config.model_config, content_format="string"
        )
        return self.tokenizer.apply_chat_template(
            conversation=conversation, messages=flat, **{**template, "tokenize": False}
        )

    def expected_ids(self, messages: Any, **template: Any) -> list[int]:
        """Like stock: the whole text tokenised at once, the placeholder being a token in it.

        Valid where no text of the conversation quotes a reserved name.
        """
        return self.tokenizer.encode(
            self.expected_text(messages, PLACEHOLDER, **template),
            add_special_tokens=False,
        )


def chat_params(template: dict[str, Any]) -> Any:
    from vllm.renderers.params import ChatParams

    return ChatParams(chat_template_kwargs=template)


def serve(folder: Path, *, vision: bool, **arguments: Any) -> Server:
    """A renderer as an API server makes it, for a tiny checkpoint in `folder`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers.registry import renderer_from_config

    write = tiny_config.write if vision else tiny_config.write_text_only
    tiny_tokenizer.write(write(folder))
    if vision:
        arguments = {"limit_mm_per_prompt": {"image": LIMIT}, **arguments}
    arguments = {"max_model_len": 8192, "enforce_eager": True, **arguments}
    config = EngineArgs(model=str(folder), **arguments).create_engine_config()
    return Server(config, renderer_from_config(config))


def copy_of(messages: Any) -> Any:
    """Deep, except that images are shared."""
    shared = {}
    for message in messages:
        for item in message["content"] if isinstance(message.get("content"), list) else ():
            if isinstance(item, dict) and "image_pil" in item:
                shared[id(item["image_pil"])] = item["image_pil"]
    return copy.deepcopy(messages, shared)


def flattened(message: dict[str, Any], image: str) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list) or message["role"] == "tool":
        return message  # of a tool's result, vLLM's own way of joining texts stays
    texts = (
        item if isinstance(item, str) else item["text"] if item["type"] == "text" else image
        for item in content
    )
    return {**message, "content": "\n\n".join(texts)}


def collapsed(engine_input: dict[str, Any]) -> list[int]:
    """Ids of an engine input with every image block folded back into one placeholder."""
    ids = list(engine_input["prompt_token_ids"])
    ranges = (engine_input.get("mm_placeholders") or {}).get("image", [])
    for block in sorted(ranges, key=lambda r: -r.offset):
        assert set(ids[block.offset : block.offset + block.length]) <= set(SENTINEL_IDS)
        ids[block.offset : block.offset + block.length] = [PLACEHOLDER_ID]
    return ids


def images_in(messages: Any) -> list[Any]:
    """Identity of every structured image of a conversation, in order."""
    items = itertools.chain.from_iterable(
        message["content"] for message in messages if isinstance(message.get("content"), list)
    )
    return [item["image_pil"] for item in items if isinstance(item, dict) and "image_pil" in item]


def refused(action: Any, *fragments: str) -> str:
    """The error text of an action that must fail with what the server answers with 400."""
    from vllm.exceptions import VLLMValidationError

    try:
        action()
    except VLLMValidationError as error:
        for fragment in fragments:
            assert fragment in str(error), f"{fragment!r} not in {error}"
        return str(error)
    raise AssertionError(f"not refused; expected {fragments}")


def no_reserved(ids: Iterable[int], images: int) -> None:
    """Only placeholders are reserved ids, and there are as many as images."""
    found = [token for token in ids if token in RESERVED]
    assert found == [PLACEHOLDER_ID] * images, f"{found} for {images} images"
