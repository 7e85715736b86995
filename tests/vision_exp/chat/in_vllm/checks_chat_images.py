"""Checks of which images a chat may have, from where, how many, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import http.server
import inspect
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import rig_chat as rig
from conversations import ASK, CALL, setting
from PIL import Image
from rig_chat import SENTINEL, Server, part, pil, refused, text

from vision_exp import settings
from vision_exp.chat import rules
from vision_exp.layout import PLACEHOLDER


def check_structured_parts_outside_user_messages(server: Server) -> None:
    for role in ("system", "assistant", "developer", "tool"):
        for count in range(3):
            bad = {"role": role, "content": [text("see"), part(1)], "tool_call_id": "c1"}
            user = {"role": "user", "content": [text("a"), *(part(n) for n in range(count))]}
            error = refused(lambda m=[user, bad]: server.chat(m), "messages[1].content[1]")
            assert repr(role) in error and "user message" in error
    assert settings.TOOL_IMAGES.name in error


def check_tool_results_out_of_call_order(server: Server) -> None:
    calls = [{**CALL, "id": name} for name in ("c1", "c2")]
    results = [
        {"role": "tool", "tool_call_id": name, "content": [text(f"of {name}"), pil(number)]}
        for name, number in (("c2", 2), ("c1", 1))
    ]
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    refused(lambda: server.chat(messages), "messages[2].content[1]", "tool", "=move", "=note")
    with setting(settings.TOOL_IMAGES.name, "note"):
        prompt = server.prompt(messages)
        assert "multi_modal_data" not in prompt
        assert prompt["prompt"].count(rules.TOOL_IMAGE_NOTE) == 2
    with setting(settings.TOOL_IMAGES.name, "move"):
        for tail in ([], [{"role": "user", "content": "which?"}]):
            prompt = server.prompt([*messages, *tail])
            shown = prompt["prompt"]
            # The encoder sorts results by call: c1 first, though c2 came first.
            first, second = shown.index("of c1"), shown.index("of c2")
            notes = [shown.index(rules.MOVED_NOTE.format(n)) for n in (1, 2)]
            assert first < notes[1] < second < notes[0]
            labels = [
                shown.index(f"{rules.MOVED_LABEL.format(n)}\n\n{PLACEHOLDER}") for n in (1, 2)
            ]
            assert max(notes) < labels[0] < labels[1]
            images = prompt["multi_modal_data"]["image"]
            assert images == [rig.sample_image(2), rig.sample_image(1)]
            rig.no_reserved(server.ids(prompt), 2)
            if tail:
                assert shown.index("which?") > labels[1]


def check_limit(server: Server) -> None:
    parts = [pil(number) for number in range(rig.LIMIT + 1)]
    assert server.ids(server.prompt([{"role": "user", "content": parts[:-1]}]))
    messages = [{"role": "user", "content": parts}]
    error = refused(lambda: server.chat(messages), "--limit-mm-per-prompt", f"is {rig.LIMIT}")
    assert "keep-newest" in error
    with setting(settings.IMAGE_OVERFLOW.name, "keep-newest"):
        prompt = server.prompt(messages)
        assert prompt["multi_modal_data"]["image"] == [rig.sample_image(n) for n in range(1, 6)]
        assert prompt["prompt"].count(rules.OVERFLOW_NOTE) == 1
        rig.no_reserved(server.ids(prompt), rig.LIMIT)


def check_same_image_same_patches(server: Server) -> None:
    image = rig.sample_image(3)
    data = rig.png(image)
    plain = rig.data_url(data)
    wrapped = plain[:60] + "\n" + plain[60:]
    sources = [
        {"type": "image_url", "image_url": {"url": plain}},
        {"type": "image_url", "image_url": {"url": wrapped}},
        {"type": "image_url", "image_url": {"url": rig.data_url(data, "data:;base64,")}},
        {"type": "image_url", "image_url": {"url": rig.data_url(data, "data:base64,")}},
        {"type": "image_url", "image_url": {"url": rig.data_url(data, "DATA:image/jpeg;BASE64,")}},
        {"type": "input_image", "image_url": plain, "detail": "auto"},
        {"type": "image", "image": image},
        {"type": "image", "url": plain},
        {"image_url": plain},
        {"type": "image_pil", "image_pil": image},
        {"type": "image_pil", "image_pil": numpy.asarray(image)},
    ]
    found = [server.chat([{"role": "user", "content": [source]}]) for source in sources]
    assert len({hashes for done in found for hashes in done["mm_hashes"]["image"]}) == 1
    assert all(done["prompt_token_ids"] == found[0]["prompt_token_ids"] for done in found)


def shown(server: Server, data: bytes, **options: Any) -> tuple[Any, bytes]:
    """Size and RGB bytes of an image file as it goes to the processor, sent as a data URL."""
    params = dataclasses.replace(rig.chat_params({}), media_io_kwargs={"image": options})
    messages = [{"role": "user", "content": [{"image_url": rig.data_url(data)}]}]
    _, prompt = server.renderer.render_messages(messages, params)
    ((image,),) = prompt["multi_modal_data"].values()
    assert image.mode == "RGB"
    return image.size, image.tobytes()


def check_images_are_seen_as_a_person_sees_them(server: Server) -> None:
    """Files that vLLM's own loader clips, or that lack their end, beside plain ones."""
    grey = numpy.arange(240, dtype=numpy.uint8).reshape(12, 20)
    wide = rig.png(Image.fromarray(grey.astype(numpy.uint16) * 257))
    assert shown(server, wide) == shown(server, rig.png(Image.fromarray(grey)))
    data = rig.png(rig.sample_image(2))
    extra = b"\0\0\0\x04tEXta\0bb" + bytes(4)  # its checksum is wrong
    for whole in (data[:-12], data[:-12] + extra, data[:-12] + extra[:-6], data + b"tail"):
        assert shown(server, whole) == shown(server, data)


def check_background(server: Server) -> None:
    clear = rig.png(Image.new("RGBA", (2, 1), (0, 0, 0, 0)))
    assert shown(server, clear) == ((2, 1), b"\xff" * 6)
    assert shown(server, clear, rgba_background_color=[1, 2, 3]) == ((2, 1), b"\1\2\3" * 2)


def check_a_connector_of_its_own(server: Server) -> None:
    """One that fetches in its own way is asked, and its images are decoded like all others."""
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

    data = rig.png(rig.sample_image(2))
    asked = []

    @MEDIA_CONNECTOR_REGISTRY.register("own")
    class Own(MediaConnector):  # type: ignore[misc]
        def fetch_image(self, image_url: str, **kwargs: Any) -> Any:
            asked.append(image_url)
            return super().fetch_image(rig.data_url(data), **kwargs)

    with setting("VLLM_MEDIA_CONNECTOR", "own"):
        got = shown(server, rig.png(rig.sample_image(1)))
    assert got == shown(server, data) and len(asked) == 1


def damaged(data: bytes) -> bytes:
    """One bit in the middle flipped."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]


def without_the_last_piece(data: bytes) -> bytes:
    """A PNG whose pixels are cut, though every chunk that is left has its checksum."""
    at = data.index(b"IDAT")
    half = b"IDAT" + data[at + 4 : (at + len(data)) // 2]
    sound = (len(half) - 4).to_bytes(4, "big") + half + zlib.crc32(half).to_bytes(4, "big")
    return data[: at - 4] + sound + data[-12:]


BAD_IMAGES = {
    "one of two pieces": without_the_last_piece(rig.png(rig.sample_image(1, (400, 300)))),
    "truncated": rig.png(rig.sample_image(1, (400, 300)))[:-90],
    "damaged": damaged(rig.png(rig.sample_image(1, (400, 300)))),
    "text": b"hello, this is no image",
    "empty": b"",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
}


def bomb() -> bytes:
    """A PNG that claims 60000 x 60000 pixels."""
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", len(header))
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + b"\0\0\0\0IDAT"
    )


def bad_parts() -> dict[str, Any]:
    parts = {
        name: {"type": "image_url", "image_url": {"url": rig.data_url(data)}}
        for name, data in {**BAD_IMAGES, "bomb": bomb()}.items()
    }
    for name, url in {
        "not base64": "data:image/png;base64,@@@@",
        "not base64 at all": "data:image/png,abc",
        "no comma": "data:image/png;base64",
        "empty url": "",
        "no scheme": "image.png",
        "file outside": "file:///etc/hostname",
    }.items():
        parts[name] = {"type": "image_url", "image_url": {"url": url}}
    for name, value in {"number": 5, "list": [1, 2], "bare base64": "iVBORw0KGgo="}.items():
        parts[name] = {"type": "image_url", "image_url": {"url": value}}
        parts[f"{name} as image"] = {"type": "image", "image": value}
    parts["nothing"] = {"type": "image_url", "image_url": None}
    return parts


def check_bad_images(server: Server) -> None:
    good = [{"role": "user", "content": [part(0), text("x")]}]
    expected = server.chat(good)["prompt_token_ids"]
    for name, bad in {
        **bad_parts(),
        "embeds": {"type": "image_embeds", "image_embeds": "A"},
        "bytes": {"type": "image", "image": rig.png(rig.sample_image(0))},
        "array of no image": {"type": "image", "image": numpy.zeros((5, 8, 8))},
        "array of any values": {"type": "image", "image": numpy.full((8, 8), -0.5)},
    }.items():
        messages = [ASK, {"role": "user", "content": [text("a"), part(0), bad]}]
        error = refused(lambda m=messages: server.chat(m), "messages[1].content[2]")
        assert len(error) < 500, name

        async def render(m: Any = messages) -> None:
            await server.renderer.render_chat_async([m], rig.chat_params({}))

        refused(lambda r=render: asyncio.run(r()), "messages[1].content[2]")
        assert server.chat(good)["prompt_token_ids"] == expected, name


def check_empty_uuid(server: Server) -> None:
    """It names no image, so two under it are not one."""
    found = [
        server.chat([{"role": "user", "content": [{**part(number), "uuid": ""}]}])["mm_hashes"]
        for number in (0, 1)
    ]
    plain = [server.chat([{"role": "user", "content": [part(n)]}])["mm_hashes"] for n in (0, 1)]
    assert found == plain and found[0] != found[1]
    nothing = {"type": "image_url", "image_url": None, "uuid": ""}
    refused(lambda: server.chat([{"role": "user", "content": [nothing]}]), "holds no image")


class ImageServer(http.server.BaseHTTPRequestHandler):
    """A web server with one image."""

    def do_GET(self) -> None:
        found = self.path == "/image.png"
        self.send_response(200 if found else 404)
        self.end_headers()
        if found:
            self.wfile.write(rig.png(rig.sample_image(0)))

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def web_server() -> Iterator[str]:
    """The address of an ImageServer."""
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ImageServer)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{web.server_port}"
    finally:
        web.shutdown()
        web.server_close()


def check_http_urls(server: Server) -> None:
    with web_server() as address:
        url = f"{address}/image.png"
        good = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        same = [{"role": "user", "content": [part(0)]}]
        assert server.chat(good)["mm_hashes"] == server.chat(same)["mm_hashes"]
        gone = [{"role": "user", "content": [text("a"), {"image_url": f"{url}.gone"}]}]
        for render in (server.renderer.render_chat, server.renderer.render_chat_async):

            def run(render: Any = render) -> Any:
                done = render([gone], rig.chat_params({}))
                return asyncio.run(done) if inspect.isawaitable(done) else done

            refused(run, "messages[0].content[1]", "404")
        assert server.chat(good)["prompt_token_ids"]


def check_reserved_ids_in_prompts(server: Server) -> None:
    render = server.renderer.render_cmpl
    for token in sorted(rig.RESERVED):
        refused(lambda t=token: render([{"prompt_token_ids": [5, t, 7]}]), str(token), "position 1")
    for words in (PLACEHOLDER, SENTINEL, f"a {SENTINEL}"):
        refused(lambda w=words: render([{"prompt": w}]), "reserved", "chat message")
    ids = {"prompt_token_ids": [5, 129264, 7], "multi_modal_data": {"image": [rig.sample_image(0)]}}
    (done,) = render([dict(ids)])
    assert rig.collapsed(done) == [5, 129264, 7]
    typed = {"prompt": f"a{PLACEHOLDER}", "multi_modal_data": {"image": [rig.sample_image(0)]}}
    assert rig.collapsed(render([typed])[0])[-1] == 129264
    refused(lambda: render([{**ids, "prompt_token_ids": [5, 7]}]))
    refused(lambda: render([{**ids, "prompt_token_ids": [129264, 129264]}]))
    refused(lambda: render([{**ids, "prompt_token_ids": [129264, 129258]}]))
    assert render([{"prompt_token_ids": [5, 129256, 129262, 129263, 129265]}])
