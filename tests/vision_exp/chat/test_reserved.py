"""Marks and the encoding of text that quotes reserved names."""

from __future__ import annotations

import pytest
import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from vision_exp.chat import reserved
from vision_exp.layout import PLACEHOLDER, TOKENS

NAMES = list(TOKENS)
HALVES = ("<｜deepseek_im", "age｜>")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer"))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode_with(tokenizer, pieces):
    return reserved.encode(pieces, lambda text: tokenizer.encode(text, add_special_tokens=False))


def test_the_names_are_tokens_of_the_tokenizer(tokenizer):
    for name, token_id in TOKENS.items():
        assert tokenizer.encode(f"a{name}b", add_special_tokens=False)[1:-1] == [token_id]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "around", [("", ""), ("a ", "\n"), ("<", ">"), ("<｜deepseek_im", "age｜>")]
)
def test_a_quoted_name_stays_text(tokenizer, name, around):
    text = name.join(around)
    ids, images = encode_with(tokenizer, reserved.ReservedTokenEscaper().split(text))
    assert images == []
    assert reserved.RESERVED_IDS.isdisjoint(ids)
    assert tokenizer.decode(ids) == text


def test_without_names_the_text_is_encoded_in_one_piece():
    assert list(reserved.ReservedTokenEscaper().split("a\n\nb <image>")) == ["a\n\nb <image>"]
    assert list(reserved.ReservedTokenEscaper().split("")) == []


def test_marks_are_images_in_the_order_of_the_text():
    escaper = reserved.ReservedTokenEscaper()
    prompt = f"a{escaper.image(1)}b{escaper.image(0)}{escaper.image(10)}"
    assert list(escaper.split(prompt)) == ["a", 1, "b", 0, 10]
    assert escaper.unescape(prompt) == f"a{PLACEHOLDER}b{PLACEHOLDER * 2}"


def test_marks_of_another_request_are_text():
    prompt = reserved.ReservedTokenEscaper().image(0)
    assert list(reserved.ReservedTokenEscaper().split(prompt)) == [prompt]


def test_escaped_names_come_back():
    escaper = reserved.ReservedTokenEscaper()
    value = {"a": [f"x{NAMES[0]}", {"b": NAMES[3]}], NAMES[1]: None, "c": 3}
    escaped = escaper.escape(value)
    assert not any(name in repr(escaped) for name in NAMES)
    assert escaper.unescape(escaped) == value
    assert list(escaper.split(escaped["a"][0])) == ["x<｜deepsee", "k_image｜>"]


def test_escape_returns_what_it_need_not_change():
    value = {"a": ["b", {"c": 1}]}
    assert reserved.ReservedTokenEscaper().escape(value) is value


def test_text_that_gives_a_reserved_token_is_an_error():
    with pytest.raises(RuntimeError, match="reserved"):
        reserved.encode(iter(["a"]), lambda text: [129258])


fragment = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        [*NAMES, "<｜deepseek_im", "age｜>", "<|", "|>", "<image>", "\n\n", "<｜User｜>"]
    ),
)


@given(st.lists(st.one_of(fragment, st.integers(0, 3)), max_size=12))
def test_any_text_survives_between_any_images(tokenizer, content):
    escaper = reserved.ReservedTokenEscaper()
    prompt = "".join(escaper.image(x) if isinstance(x, int) else escaper.escape(x) for x in content)
    ids, images = encode_with(tokenizer, escaper.split(prompt))
    assert images == [x for x in content if isinstance(x, int)]
    assert reserved.RESERVED_IDS.intersection(ids) <= {TOKENS[PLACEHOLDER]}
    plain = "".join(PLACEHOLDER if isinstance(x, int) else x for x in content)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == plain
    prose = "".join(x for x in content if isinstance(x, str))
    if not reserved.has_reserved_name(prose):
        assert ids == tokenizer.encode(plain, add_special_tokens=False)
