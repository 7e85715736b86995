"""Checks of chat rendering on one vLLM release: each function is one check."""

from __future__ import annotations

import asyncio
import http.server
import inspect
import json
import logging
import os
import random
import threading
from contextlib import contextmanager
from typing import Any

import messages_rig as rig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages_rig import SENTINEL, Server, part, pil, refused, text

from vision_exp import messages_rules
from vision_exp.tokens import PLACEHOLDER, TOKENS

FORMS = {
    "bare tag": "look at <image> here",
    "paired tag": "<image>a.png</image>",
    "literal": f"say {PLACEHOLDER} twice {PLACEHOLDER}",
    "sentinel": f"{SENTINEL}<|place_holder_mm_span_0435|>",
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
ASK = {"role": "user", "content": "go"}


def conversation(field: str, words: str) -> tuple[list[Any], dict[str, Any]]:
    """A conversation that has the words in one of its text fields, and template arguments."""
    call = json.loads(json.dumps(CALL))
    answer: dict[str, Any] = {"role": "assistant", "content": "ok"}
    result: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    tool = json.loads(json.dumps(TOOL))
    messages: list[Any] = [{"role": "system", "content": "be kind"}, dict(ASK)]
    if field == "system":
        messages[0]["content"] = words
    elif field == "user":
        messages[1]["content"] = words
    elif field == "assistant":
        messages += [{**answer, "content": words}]
    elif field == "reasoning":
        messages += [{**answer, "reasoning": words, "tool_calls": [call]}, result]
    elif field == "tool call":
        # json.dumps escapes the bars of the placeholder, as most clients do
        call["function"]["arguments"] = json.dumps({"a": words, words: [1]})
        messages += [{**answer, "tool_calls": [call]}, result]
    elif field == "tool result":
        messages += [{**answer, "tool_calls": [call]}, {**result, "content": [text(words)]}]
    elif field == "tool description":
        tool["function"]["description"] = words
    template = {"thinking": True, "tools": [tool]}
    return messages, template


FIELDS = "system user assistant reasoning:tool call:tool result:tool description".replace(
    " ", ":", 2
).split(":")


def check_text_fields(server: Server) -> None:
    """role x form x number of images: the text survives, no placeholder appears or moves."""
    for field in FIELDS:
        for words in FORMS.values():
            for count in range(3):
                messages, template = conversation(field, words)
                parts = [text(words), *(part(n) for n in range(count)), text(words)]
                messages.append({"role": "user", "content": parts})
                done = server.chat(messages, **template)
                ids = rig.collapsed(done)
                where = (field, words, count)
                rig.no_reserved(ids, count)
                expected = server.expected_text(messages, PLACEHOLDER, **template)
                assert server.tokenizer.decode(ids) == expected, where
                assert words in expected, where
                alone = [mm_hash(server, number) for number in range(count)]
                assert done.get("mm_hashes", {}).get("image", []) == alone, where


def mm_hash(server: Server, number: int) -> str:
    (found,) = server.chat([{"role": "user", "content": [part(number)]}])["mm_hashes"]["image"]
    return found


def check_structured_parts_outside_user_messages(server: Server) -> None:
    for role in ("system", "assistant", "developer", "tool"):
        for count in range(3):
            bad = {"role": role, "content": [text("see"), part(1)], "tool_call_id": "c1"}
            user = {"role": "user", "content": [text("a"), *(part(n) for n in range(count))]}
            error = refused(lambda m=[user, bad]: server.chat(m), "messages[1].content[1]")
            assert repr(role) in error and "user message" in error
    assert messages_rules.TOOL_IMAGES_VARIABLE in error


def check_golden_prompts(server: Server) -> None:
    """The exact strings and, through the tokenizer, the exact ids."""
    bos, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    user, assistant = "<｜User｜>", "<｜Assistant｜>"
    p = PLACEHOLDER
    goldens = [
        (
            [{"role": "user", "content": [text("A"), pil(0), text("B"), pil(1)]}],
            f"{bos}{user}A\n\n{p}\n\nB\n\n{p}{assistant}</think>",
        ),
        ([{"role": "user", "content": [pil(0)]}], f"{bos}{user}{p}{assistant}</think>"),
        (
            [{"role": "user", "content": [pil(0), pil(1)]}],
            f"{bos}{user}{p}\n\n{p}{assistant}</think>",
        ),
        (
            [
                {"role": "system", "content": "S"},
                {"role": "user", "content": [pil(0), text("A\n")]},
                {"role": "assistant", "content": "B"},
                {"role": "user", "content": [text("\n"), pil(1)]},
            ],
            f"{bos}S{user}{p}\n\nA\n{assistant}</think>B{end}{user}\n\n\n{p}{assistant}</think>",
        ),
    ]
    for messages, golden in goldens:
        ids = rig.collapsed(server.chat(messages, thinking=False))
        assert ids == server.tokenizer.encode(golden, add_special_tokens=False), golden
        assert ids.count(rig.PLACEHOLDER_ID) == golden.count(p)
    for effort in (None, "low", "high", "max"):
        messages = [{"role": "user", "content": [text("A"), pil(0)]}]
        template = {"thinking": True, "tools": [TOOL], "reasoning_effort": effort}
        ids = rig.collapsed(server.chat(messages, **template))
        assert ids == server.expected_ids(messages, **template), effort


def check_text_requests_are_stock(server: Server) -> None:
    """Without images and quoted names: the text that stock renders, and its ids."""
    original = type(server.renderer).render_messages.__wrapped__
    for messages in (
        [ASK],
        [{"role": "system", "content": "use <image> tags"}, ASK],
        conversation("tool result", "x")[0],
    ):
        for tokenize in (False, True):
            params = rig.chat_params({"thinking": True, "tokenize": tokenize})
            stock = original(server.renderer, rig.copy_of(messages), params)[1]
            (done,) = server.renderer.render_chat([rig.copy_of(messages)], params)[1]
            assert done["prompt_token_ids"] == server.ids(stock)
            if not tokenize:
                assert server.prompt(messages, thinking=True) == stock


def check_chat_defaults(server: Server, plain: Server) -> None:
    """The template brings the special tokens, as for the text-only checkpoint."""
    assert server.renderer.default_chat_tok_params.add_special_tokens is False
    assert plain.renderer.default_chat_tok_params.add_special_tokens is False
    assert server.renderer.default_cmpl_tok_params.add_special_tokens is True


def check_other_renderers_are_refused(server: Server, plain: Server) -> None:
    from vllm.renderers.registry import renderer_from_config

    for config, refuses in ((server.config, True), (plain.config, False)):
        config.model_config.tokenizer_mode = "hf"
        try:
            renderer_from_config(config)
        except RuntimeError as error:
            assert refuses and "--tokenizer-mode" in str(error)
        else:
            assert not refuses
        finally:
            config.model_config.tokenizer_mode = "deepseek_v4"


def check_text_only_checkpoint(server: Server, plain: Server) -> None:
    """Another checkpoint in the same process: everything as stock, reserved names included."""
    assert plain.config.model_config.multimodal_config is None
    messages = [{"role": "user", "content": [text(f"a {PLACEHOLDER}"), text("b")]}]
    original = type(plain.renderer).render_messages.__wrapped__
    stock = original(plain.renderer, rig.copy_of(messages), rig.chat_params({}))
    params = rig.chat_params({})
    assert plain.renderer.render_messages(rig.copy_of(messages), params) == stock
    ids = plain.chat(messages)["prompt_token_ids"]
    assert ids == plain.ids(stock[1]) and rig.PLACEHOLDER_ID in ids
    (raw,) = plain.renderer.render_cmpl([{"prompt_token_ids": [5, 129257, 129264]}])
    assert raw["prompt_token_ids"] == [5, 129257, 129264]


def check_async_equals_sync(server: Server) -> None:
    messages = [
        {"role": "system", "content": f"quote {PLACEHOLDER}"},
        {"role": "user", "content": [text(SENTINEL), part(0), text("b"), part(1)]},
    ]

    async def render() -> Any:
        params = rig.chat_params({})
        return await server.renderer.render_chat_async([rig.copy_of(messages)], params)

    conversations, (done,) = asyncio.run(render())
    assert done["prompt_token_ids"] == server.chat(messages)["prompt_token_ids"]
    assert conversations[0][1]["content"] == f"{SENTINEL}\n\n{PLACEHOLDER}\n\nb\n\n{PLACEHOLDER}"
    assert conversations[0][0]["content"] == f"quote {PLACEHOLDER}"


def check_tool_results_out_of_call_order(server: Server) -> None:
    calls = [{**CALL, "id": name} for name in ("c1", "c2")]
    results = [
        {"role": "tool", "tool_call_id": name, "content": [text(f"of {name}"), pil(number)]}
        for name, number in (("c2", 2), ("c1", 1))
    ]
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    refused(lambda: server.chat(messages), "messages[2].content[1]", "tool", "=move", "=note")
    with setting(messages_rules.TOOL_IMAGES_VARIABLE, "note"):
        prompt = server.prompt(messages)
        assert "multi_modal_data" not in prompt
        assert prompt["prompt"].count(messages_rules.TOOL_IMAGE_NOTE) == 2
    with setting(messages_rules.TOOL_IMAGES_VARIABLE, "move"):
        for tail in ([], [{"role": "user", "content": "which?"}]):
            prompt = server.prompt([*messages, *tail])
            shown = prompt["prompt"]
            # The encoder sorts results by call: c1 first, though c2 came first.
            first, second = shown.index("of c1"), shown.index("of c2")
            notes = [shown.index(messages_rules.MOVED_NOTE.format(n)) for n in (1, 2)]
            assert first < notes[1] < second < notes[0]
            labels = [
                shown.index(f"{messages_rules.MOVED_LABEL.format(n)}\n\n{PLACEHOLDER}")
                for n in (1, 2)
            ]
            assert max(notes) < labels[0] < labels[1]
            images = prompt["multi_modal_data"]["image"]
            assert images == [rig.picture(2), rig.picture(1)]
            rig.no_reserved(server.ids(prompt), 2)
            if tail:
                assert shown.index("which?") > labels[1]


def check_limit(server: Server) -> None:
    parts = [pil(number) for number in range(rig.LIMIT + 1)]
    assert server.ids(server.prompt([{"role": "user", "content": parts[:-1]}]))
    messages = [{"role": "user", "content": parts}]
    error = refused(lambda: server.chat(messages), "--limit-mm-per-prompt", f"is {rig.LIMIT}")
    assert "keep-newest" in error
    with setting(messages_rules.OVERFLOW_VARIABLE, "keep-newest"):
        prompt = server.prompt(messages)
        assert prompt["multi_modal_data"]["image"] == [rig.picture(n) for n in range(1, 6)]
        assert prompt["prompt"].count(messages_rules.OVERFLOW_NOTE) == 1
        rig.no_reserved(server.ids(prompt), rig.LIMIT)


def check_same_picture_same_patches(server: Server) -> None:
    import numpy

    image = rig.picture(3)
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


BAD_PICTURES = {
    "truncated": rig.png(rig.picture(1, (400, 300)))[:-90],
    "text": b"hello, this is no image",
    "empty": b"",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
}


def bomb() -> bytes:
    """A PNG that claims 60000 x 60000 pixels."""
    import struct
    import zlib

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
        for name, data in {**BAD_PICTURES, "bomb": bomb()}.items()
    }
    for name, url in {
        "not base64": "data:image/png;base64,@@@@",
        "not base64 at all": "data:image/png,abc",
        "no comma": "data:image/png;base64",
        "empty url": "",
        "no scheme": "picture.png",
        "file outside": "file:///etc/hostname",
    }.items():
        parts[name] = {"type": "image_url", "image_url": {"url": url}}
    parts["nothing"] = {"type": "image_url", "image_url": None}
    return parts


def check_bad_pictures(server: Server) -> None:
    good = [{"role": "user", "content": [part(0), text("x")]}]
    expected = server.chat(good)["prompt_token_ids"]
    for name, bad in {
        **bad_parts(),
        "embeds": {"type": "image_embeds", "image_embeds": "A"},
    }.items():
        messages = [ASK, {"role": "user", "content": [text("a"), part(0), bad]}]
        error = refused(lambda m=messages: server.chat(m), "messages[1].content[2]")
        assert len(error) < 500, name

        async def render(m: Any = messages) -> None:
            await server.renderer.render_chat_async([m], rig.chat_params({}))

        refused(lambda r=render: asyncio.run(r()), "messages[1].content[2]")
        assert server.chat(good)["prompt_token_ids"] == expected, name


class Pictures(http.server.BaseHTTPRequestHandler):
    """A web server with one picture."""

    def do_GET(self) -> None:
        found = self.path == "/picture.png"
        self.send_response(200 if found else 404)
        self.end_headers()
        if found:
            self.wfile.write(rig.png(rig.picture(0)))

    def log_message(self, *args: Any) -> None:
        pass


def check_http_urls(server: Server) -> None:
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{web.server_port}/picture.png"
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
    finally:
        web.shutdown()
        web.server_close()


def check_reserved_ids_in_prompts(server: Server) -> None:
    render = server.renderer.render_cmpl
    for token in sorted(rig.RESERVED):
        refused(lambda t=token: render([{"prompt_token_ids": [5, t, 7]}]), str(token), "position 1")
    for words in (PLACEHOLDER, SENTINEL, f"a {SENTINEL}"):
        refused(lambda w=words: render([{"prompt": w}]), "reserved", "chat message")
    ids = {"prompt_token_ids": [5, 129264, 7], "multi_modal_data": {"image": [rig.picture(0)]}}
    (done,) = render([dict(ids)])
    assert rig.collapsed(done) == [5, 129264, 7]
    typed = {"prompt": f"a{PLACEHOLDER}", "multi_modal_data": {"image": [rig.picture(0)]}}
    assert rig.collapsed(render([typed])[0])[-1] == 129264
    refused(lambda: render([{**ids, "prompt_token_ids": [5, 7]}]))
    refused(lambda: render([{**ids, "prompt_token_ids": [129264, 129264]}]))
    refused(lambda: render([{**ids, "prompt_token_ids": [129264, 129258]}]))
    assert render([{"prompt_token_ids": [5, 129256, 129262, 129263, 129265]}])


def check_copied_encoder(server: Server) -> None:
    """An encoder that refuses placeholders it did not place, as the checkpoint's own does."""
    import vllm.tokenizers.deepseek_v4 as module

    stock = module.encode_messages

    def strict(messages: Any, **options: Any) -> str:
        if PLACEHOLDER in json.dumps(messages, ensure_ascii=False):
            raise ValueError("placeholders are placed by the encoder")
        if any(isinstance(message.get("content"), list) for message in messages):
            raise ValueError("content must be text here")
        return stock(messages, **options)

    for field in FIELDS:
        messages, template = conversation(field, FORMS["literal"])
        messages.append({"role": "user", "content": [part(0), text(PLACEHOLDER)]})
        expected = server.chat(messages, **template)["prompt_token_ids"]
        module.encode_messages = strict
        try:
            assert server.chat(messages, **template)["prompt_token_ids"] == expected, field
            system = [{"role": "system", "content": [part(0)]}]
            refused(lambda m=system: server.chat(m), "messages[0].content[0]")
        finally:
            module.encode_messages = stock


def check_image_as_text_warns_once(server: Server) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("vllm.vision_exp")
    logger.addHandler(handler)
    try:
        url = rig.data_url(os.urandom(400))
        server.prompt([{"role": "user", "content": "see data:image/png;base64,AAAA"}])
        assert not records
        for content in (f"see {url}", [text(url), pil(0)]):
            server.prompt([{"role": "user", "content": content}])
    finally:
        logger.removeHandler(handler)
    assert len(records) == 1 and "text" in records[0].getMessage()


def check_field_reports(server: Server) -> None:
    """Conversations that broke other implementations."""
    grep = f"vision_exp/x.py:3: PLACEHOLDER = '{PLACEHOLDER}'\nREADME.md:9: <image>{SENTINEL}"
    poisoned = [
        {"role": "user", "content": "How do I send a picture?"},
        {
            "role": "assistant",
            "content": f"Write <image> or {PLACEHOLDER}.",
            "reasoning": "<image>",
        },
        {"role": "user", "content": "ping"},
    ]
    agent = [
        {"role": "user", "content": [text("Describe"), pil(0)]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": grep},
        {"role": "assistant", "content": f"It says {PLACEHOLDER}", "reasoning": f"see {SENTINEL}"},
        {"role": "user", "content": [pil(1), text(f"and {PLACEHOLDER}?"), pil(2)]},
    ]
    for messages, count in ((poisoned, 0), (agent, 3)):
        for template in ({"thinking": True, "tools": [TOOL]}, {"thinking": False}):
            prompt = server.prompt(messages, **template)
            ids = server.ids(prompt)
            rig.no_reserved(ids, count)
            expected = server.expected_text(messages, PLACEHOLDER, **template)
            assert server.tokenizer.decode(ids) == expected
            images = prompt.get("multi_modal_data", {}).get("image", [])
            assert images == rig.pictures_in(messages)
    bad = [*agent[:2], {**agent[2], "content": [text("shot"), pil(4)]}]
    for tail in ([], [ASK, {"role": "assistant", "content": "ok"}, {**ASK, "content": "ping"}]):
        refused(lambda t=tail: server.prompt([*bad, *t]), "messages[2].content[1]")
        for mode in ("move", "note"):
            with setting(messages_rules.TOOL_IMAGES_VARIABLE, mode):
                images = server.prompt([*bad, *tail])["multi_modal_data"]["image"]
                assert len(images) == (2 if mode == "move" else 1)


def check_200_conversations_against_the_text_encoder(server: Server) -> None:
    """Ids with images equal those of the text encoder, id by id; through the processor too."""
    chooser = random.Random(8)
    for number in range(200):
        messages, template = random_conversation(chooser)
        prompt = server.prompt(messages, **template)
        assert server.ids(prompt) == server.expected_ids(messages, **template), messages
        images = prompt.get("multi_modal_data", {}).get("image", [])
        assert images == rig.pictures_in(messages)
        if number % 8 == 0:
            assert rig.collapsed(server.chat(messages, **template)) == server.ids(prompt)


WORDS = [
    "a",
    " the",
    "\n",
    "\n\n",
    "image",
    " 12345",
    "日本",
    "<image>",
    "<｜deep",
    "  ",
    "é",
    "<|",
]


def random_conversation(chooser: random.Random) -> tuple[list[Any], dict[str, Any]]:
    def words() -> str:
        return "".join(chooser.choices(WORDS, k=chooser.randrange(6)))

    left = rig.LIMIT
    messages: list[Any] = []
    if chooser.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    for _ in range(chooser.randrange(1, 4)):
        parts: list[Any] = []
        for _ in range(chooser.randrange(5)):
            if left and chooser.random() < 0.5:
                left -= 1
                parts.append(pil(chooser.randrange(20)))
            else:
                parts.append(text(words()))
        messages.append({"role": "user", "content": parts or words()})
        answer: dict[str, Any] = {"role": "assistant", "content": words()}
        if chooser.random() < 0.4:
            answer["reasoning"] = words()
        if chooser.random() < 0.4:
            arguments = json.dumps({words(): words()})
            function = {"name": "f", "arguments": arguments}
            answer["tool_calls"] = [{**CALL, "function": function}]
            result = {"role": "tool", "tool_call_id": "c1", "content": [text(words())]}
            messages += [answer, result]
        else:
            messages.append(answer)
    if chooser.random() < 0.7 and messages[-1]["role"] == "assistant":
        messages.pop()
    template: dict[str, Any] = {"thinking": chooser.random() < 0.5}
    if chooser.random() < 0.3:
        template["tools"] = [TOOL]
    return messages, template


prose = st.lists(st.sampled_from([*TOKENS, *FORMS.values(), *WORDS]), max_size=4).map("".join)
user_parts = st.lists(st.one_of(prose.map(text), st.integers(0, 9).map(pil)), max_size=4)
any_message = st.one_of(
    st.builds(lambda c: {"role": "user", "content": c}, st.one_of(prose, user_parts)),
    st.builds(lambda c: {"role": "system", "content": c}, prose),
    st.builds(lambda c, r: {"role": "assistant", "content": c, "reasoning": r}, prose, prose),
    st.builds(
        lambda c, a: {
            "role": "assistant",
            "content": c,
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": json.dumps({a: a})}}],
        },
        prose,
        prose,
    ),
    st.builds(
        lambda c: {"role": "tool", "tool_call_id": "c1", "content": c},
        st.one_of(prose, st.lists(prose.map(text), max_size=2)),
    ),
)


def check_2000_conversations(server: Server) -> None:
    """Placeholders are the structured parts in order, and the text survives."""
    options = {"max_examples": 2000, "derandomize": True, "deadline": None, "database": None}
    health = list(HealthCheck)

    @settings(**options, suppress_health_check=health)
    @given(st.lists(any_message, min_size=1, max_size=5), st.booleans())
    def hold(messages: list[Any], thinking: bool) -> None:
        images = rig.pictures_in(messages)
        if len(images) > rig.LIMIT:
            refused(lambda: server.prompt(messages), "--limit-mm-per-prompt")
            return
        prompt = server.prompt(messages, thinking=thinking)
        ids = server.ids(prompt)
        rig.no_reserved(ids, len(images))
        found = prompt.get("multi_modal_data", {}).get("image", [])
        assert len(found) == len(images)
        assert all(a is b for a, b in zip(found, images, strict=True))
        expected = server.expected_text(messages, PLACEHOLDER, thinking=thinking)
        assert server.tokenizer.decode(ids) == expected

    hold()


@contextmanager
def setting(variable: str, value: str) -> Any:
    os.environ[variable] = value
    try:
        yield
    finally:
        del os.environ[variable]
