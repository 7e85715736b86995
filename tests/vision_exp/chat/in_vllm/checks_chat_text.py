"""Checks of what a chat renders to: texts, templates and ids, quoted names among them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import Any

import rig_chat as rig
from conversations import ASK, FIELDS, FORMS, TOOL, conversation
from rig_chat import SENTINEL, Server, part, pil, refused, text

from vision_exp.layout import PLACEHOLDER


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
