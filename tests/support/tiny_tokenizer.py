"""A DeepSeek-V4 tokenizer small enough for tests: special tokens at their ids, bytes for the rest.

Every text encodes and decodes without loss (byte-level BPE, with a handful of merges so that token
boundaries matter). Begin and end of sentence, the image placeholder and the five sentinels carry
the ids of the checkpoint; the others have those of the V3 family, or free ids near them.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCAB_SIZE = 129280

SENTINEL_TOKENS = {f"<|place_holder_mm_span_{431 + kind:04}|>": 129257 + kind for kind in range(5)}
PLACEHOLDER_TOKEN = "<｜deepseek_image｜>"

SPECIAL_TOKENS = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜▁pad▁｜>": 2,
    "｜DSML｜": 128793,
    "<think>": 128798,
    "</think>": 128799,
    "<｜fim▁hole｜>": 128800,
    "<｜fim▁begin｜>": 128801,
    "<｜fim▁end｜>": 128802,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<｜latest_reminder｜>": 128815,
    "<｜action｜>": 128816,
    "<｜query｜>": 128817,
    "<｜authority｜>": 128818,
    "<｜domain｜>": 128819,
    "<｜title｜>": 128820,
    "<｜read_url｜>": 128821,
    **SENTINEL_TOKENS,
    PLACEHOLDER_TOKEN: 129264,
    "<|place_holder_mm_span_last|>": VOCAB_SIZE - 1,  # so that the highest id is the checkpoint's
}
# Skipped by `decode(skip_special_tokens=True)`; the others are text for tool and reasoning parsers.
_SKIPPED_ON_DECODE = {"<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"}

# Pairs that BPE joins: newlines, so that a wrong cut between parts shows, and pieces of the
# placeholder's own name.
_MERGES = [
    ("Ċ", "Ċ"),
    ("ĊĊ", "ĊĊ"),
    ("Ġ", "t"),
    ("t", "h"),
    ("th", "e"),
    ("i", "m"),
    ("im", "a"),
    ("ima", "g"),
    ("imag", "e"),
    ("p", "l"),
    ("s", "p"),
    ("sp", "a"),
    ("spa", "n"),
    ("<", "|"),
    ("|", ">"),
]
_PRE_TOKEN_PATTERN = r"[\r\n]+|\s+(?!\S)|\s?[^\s\d]+|\d{1,3}|\s"


def _byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in byte-level BPE, in byte order."""
    ranges = [("!", "~"), ("¡", "¬"), ("®", "ÿ")]
    printable = {code for first, last in ranges for code in range(ord(first), ord(last) + 1)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _tokenizer_json() -> dict:
    first_byte_id = 3
    vocab = {char: first_byte_id + byte for byte, char in enumerate(_byte_alphabet())}
    for left, right in _MERGES:
        vocab[left + right] = first_byte_id + len(vocab)
    # The id of an added token counts only when the model's vocabulary holds the token as well.
    vocab.update(SPECIAL_TOKENS)
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in _SKIPPED_ON_DECODE,
        }
        for token, token_id in SPECIAL_TOKENS.items()
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": _PRE_TOKEN_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[left, right] for left, right in _MERGES],
        },
    }


def write(folder: Path) -> Path:
    """Writes `tokenizer.json` and `tokenizer_config.json` into `folder`, and returns the folder.

    The folder is made if it is absent. Load it with `PreTrainedTokenizerFast.from_pretrained`, or
    in vLLM with `tokenizer_mode="deepseek_v4"`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": "<｜end▁of▁sentence｜>",
        "pad_token": "<｜▁pad▁｜>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
    }
    files = {"tokenizer.json": _tokenizer_json(), "tokenizer_config.json": config}
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (folder / name).write_text(text, encoding="utf-8")
    return folder
