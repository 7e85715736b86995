"""Images that come as text."""

from __future__ import annotations

import base64
import io
import json
import logging
import textwrap

import pytest
from PIL import Image

from vision_exp.chat import as_text

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF")


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((60, 44), 90).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


def forms(data: bytes) -> dict[str, str]:
    plain = base64.b64encode(data).decode()
    url = f"data:image/png;base64,{plain}"
    return {
        "plain": plain,
        "data URL": url,
        "charset": f"data:image/png;charset=utf-8;base64,{plain}",
        "upper case": f"DATA:IMAGE/PNG;BASE64,{plain}",
        "lines": textwrap.fill(plain, 76),
        "lines of a data URL": textwrap.fill(url, 60),
        "indented": textwrap.indent(textwrap.fill(plain, 64), "    ").replace("\n", "\r\n"),
        "url-safe": base64.urlsafe_b64encode(data).decode(),
        "JSON": json.dumps({"lines": textwrap.fill(plain, 76)}),
        "escaped slashes": json.dumps({"url": url}).replace("/", "\\/"),
        "escaped base64": f"data:image/png;base64,{plain.replace('/', chr(92) + 'u002F')}",
        "in a URL": f"data:image/png;base64,{plain.replace('/', '%2F').replace('+', '%2b')}",
        "a list of lines": json.dumps(textwrap.wrap(plain, 76), indent=1),
        "in a sentence": f"see ![x]({url}) there",
    }


@pytest.mark.parametrize("kind", FORMATS)
def test_every_form_is_found(kind):
    for name, text in forms(encoded(kind)).items():
        assert as_text.is_image(text), (name, text[:80])


def test_any_type_in_a_data_url():
    assert as_text.is_image(f"data:image/x-own;base64,{'QUJD' * 90}")
    assert not as_text.is_image(f"data:text/plain;base64,{'QUJD' * 90}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "data:image/png;base64,AAAA",
        "a PNG in base64 begins with iVBORw0KGgo, a JPEG with /9j/, " + "and so on " * 60,
        base64.b64encode(b"not an image " * 60).decode(),
        "UklGR is " + "prose of many short words without an end " * 20,
    ],
)
def test_prose_and_other_data_are_not(text):
    assert not as_text.is_image(text)


def test_each_kind_of_place_is_said_once(caplog):
    text = base64.b64encode(encoded("PNG")).decode()
    call = {"function": {"name": "f", "arguments": {"a": [text]}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "user", "content": text},
        {"role": "assistant", "content": None, "reasoning": text, "tool_calls": [call, "odd"]},
        {"role": "tool", "content": text},
        "odd",
    ]
    warned: set[str] = set()
    with caplog.at_level(logging.WARNING, logger="vllm.vision_exp"):
        as_text.warn(messages, warned)
        as_text.warn(messages, warned)
    assert len(caplog.records) == len(warned) == 4
    assert all("image_url part" in record.getMessage() for record in caplog.records)
