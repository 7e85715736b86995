"""Fenced blocks in a source file: how they are written, found, checked and taken out again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from anchors import __version__
from anchors.digests import sha256

_FENCE = re.compile(rb"[ \t]*# (>>>|<<<) vision-exp:([a-z0-9-]+)[ \t]*\r?\n?")
_HEADER = re.compile(r"\s*# Added by vision-exp ([0-9][\w.+]*) \(body ([0-9a-f]{12})\)")


@dataclass(frozen=True)
class Block:
    """One fenced block: `intact` when its body is as the `version` that wrote it left it."""

    id: str
    text: str
    version: str
    intact: bool


@dataclass(frozen=True)
class Split:
    """A file taken apart: `stock` without our blocks, and `broken` naming a fence that is wrong."""

    stock: bytes
    blocks: tuple[Block, ...]
    broken: str = ""


def newline_of(data: bytes) -> str:
    """The line ending most lines of `data` use."""
    return "\r\n" if data.count(b"\r\n") * 2 > data.count(b"\n") else "\n"


def render(anchor_id: str, body: str, indent: str = "") -> str:
    """A fenced block with `\\n` line ends: fences, a header with the body's digest, the body."""
    lines = "".join(f"{indent}{line}\n" if line else "\n" for line in body.splitlines())
    header = f"# Added by vision-exp {__version__} (body {sha256(lines.encode())[:12]})"
    return (
        f"{indent}# >>> vision-exp:{anchor_id}\n"
        f"{indent}{header}; `hotfix.py revert` takes it out.\n"
        f"{lines}"
        f"{indent}# <<< vision-exp:{anchor_id}\n"
    )


def insert(data: bytes, blocks: list[tuple[int | None, str]]) -> bytes:
    """`data` with each `(line, text)` put before that 0-based line, or at the end for None."""
    newline = newline_of(data)
    lines = data.split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    for line, text in sorted(
        blocks, key=lambda item: len(lines) if item[0] is None else item[0], reverse=True
    ):
        encoded = text.replace("\n", newline).encode()
        if line is not None:
            lines.insert(line, encoded)
        elif lines and not lines[-1].endswith(b"\n"):
            # No final newline: the block brings the one before it and ends without one, so
            # that taking it out gives the original last line back.
            lines.append(newline.encode() + encoded[: -len(newline)])
        else:
            lines.append(encoded)
    return b"".join(lines)


def split(data: bytes) -> Split:
    """Takes our blocks out of `data`, whichever version wrote them."""
    if b"vision-exp:" not in data:
        return Split(data, ())
    kept: list[bytes] = []
    blocks: list[Block] = []
    body: list[bytes] = []
    opened = ""
    for line in _lines(data):
        fence = _FENCE.fullmatch(line) if b"vision-exp:" in line else None
        if fence is None:
            (body if opened else kept).append(line)
            continue
        kind, name = fence.group(1), fence.group(2).decode()
        if kind == b">>>":
            if opened:
                return Split(data, (), f"{opened}: opened, and not closed before {name} opens")
            opened, body = name, [line]
        elif name != opened:
            return Split(data, (), f"{name}: closed without having been opened")
        else:
            blocks.append(_block(name, b"".join([*body, line])))
            if not line.endswith(b"\n") and kept:
                newline = b"\r\n" if body[0].endswith(b"\r\n") else b"\n"
                kept[-1] = kept[-1].removesuffix(newline)
            opened = ""
    if opened:
        return Split(data, (), f"{opened}: opened and never closed")
    names = [block.id for block in blocks]
    for name in names:
        if names.count(name) > 1:
            return Split(data, (), f"{name}: present {names.count(name)} times")
    return Split(b"".join(kept), tuple(blocks))


def _lines(data: bytes) -> list[bytes]:
    """Lines ended by `\\n` alone: a lone carriage return stays inside its line."""
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", data)


def _block(name: str, raw: bytes) -> Block:
    text = raw.decode("utf-8", "replace").replace("\r\n", "\n")
    if not text.endswith("\n"):
        text += "\n"  # the file ends without a newline, and so does its last block
    lines = text.splitlines(keepends=True)
    header = _HEADER.match(lines[1]) if len(lines) > 2 else None
    if header is None:
        return Block(name, text, "", False)
    digest = sha256("".join(lines[2:-1]).encode())[:12]
    return Block(name, text, header.group(1), digest == header.group(2))
