"""Which parts of a chat are images, and what happens to those that are not allowed.

Only a structured part is an image, and only in a user message or a latest reminder; prose never is.
Plain data in, plain data out: no vLLM, no decoding, no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vision_exp import settings

LIMIT_FLAG = "--limit-mm-per-prompt"

SEPARATOR = "\n\n"  # the checkpoint's encoder joins the parts of a message with it

TOOL_IMAGE_NOTE = "[An image of this tool result was left out.]"
MOVED_NOTE = "[Image #{} of the tool results is shown after them.]"
MOVED_LABEL = "[Image #{} of the tool results:]"
OVERFLOW_NOTE = "[An earlier image was left out: the request has more images than its limit.]"
UNREADABLE_NOTE = "[An earlier image was left out: it could not be read.]"

_LONGEST_REASON = 600
_IMAGE_ROLES = ("user", "latest_reminder")

_IMAGE_TYPES = ("image", "image_url", "input_image", "image_pil", "image_embeds")
_IMAGE_KEYS = ("image_url", "image_pil", "image", "image_embeds")
_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}


class RuleError(ValueError):
    """A request that breaks a rule; the text is for the client."""


@dataclass(frozen=True)
class Policy:
    """What to do with images of tool messages (settings.TOOL_IMAGES), with more than `limit` images
    (settings.IMAGE_OVERFLOW), None being no limit, and with images of earlier turns that cannot be
    read (settings.UNREADABLE_IMAGES)."""

    tool_images: str = "refuse"
    overflow: str = "refuse"
    limit: int | None = None
    unreadable: str = "refuse"


@dataclass(frozen=True)
class ImagePart:
    """A structured image of a request, and its place, such as `messages[3].content[1]`.

    `earlier`: an answer followed already, so that the client sends it again and not for the first
    time.
    """

    where: str
    part: Mapping[str, Any]
    earlier: bool = False


@dataclass(frozen=True)
class Chat:
    """Messages whose content holds `mark(i)` where `images[i]` belongs, and no image part."""

    messages: list[Any]
    images: list[ImagePart]


@dataclass
class _Turn:
    """A message with its content as a list; `parts` is None where it is not one."""

    message: Any
    parts: list[Any] | None

    @property
    def role(self) -> Any:
        return _role(self.message)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def is_image(part: Any) -> bool:
    """True for a structured image part, whatever it holds."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    if kind in _IMAGE_TYPES:
        return True
    # As vLLM does, which looks at the keys of a part also where it has a uuid.
    keys_count = kind is None or part.get("uuid") is not None
    return keys_count and any(key in part for key in _IMAGE_KEYS)


def read_chat(messages: Sequence[Any], policy: Policy, mark: Callable[[int], str]) -> Chat:
    """Apply the rules to the messages of a request, which stay as they are.

    The parts of a message keep their order and are joined by two newlines; those of a tool's result
    without images are left to vLLM, which puts one between them. Raises RuleError naming the
    message, its role and what to do, or the limit and its flag.
    """
    for index, message in enumerate(messages):
        _check_message(index, message)
    newest = _newest_turn(messages)
    turns = [_turn(index, message, index < newest) for index, message in enumerate(messages)]
    texts = [turn for turn in turns if turn.role == "tool" and not _images([turn])]
    turns = _resolve_tool_images(turns, policy.tool_images)
    for turn in turns:
        _check_role(turn)
    _resolve_overflow(turns, policy)
    images: list[ImagePart] = []
    for parts, index, image in _images(turns):
        parts[index] = mark(len(images))
        images.append(image)
    plain = {id(turn) for turn in texts}
    return Chat([t.message if id(t) in plain else _rebuilt(t) for t in turns], images)


def _check_message(index: int, message: Any) -> None:
    """vLLM's Responses endpoint hands on items that it knows nothing of, and fails at their role.

    A computer's screenshot and a generated image are among them.
    """
    role = _role(message)
    if role and isinstance(role, str):
        return
    kind = type(message).__name__
    if isinstance(message, Mapping):
        kind = message.get("type", kind)
    raise RuleError(
        f"messages[{index}]: a chat has no place for an item of type {kind!r:.80}, which has no "
        "role. Leave it out, or say what it holds in a user message."
    )


def has_images(messages: Iterable[Any]) -> bool:
    """Whether any message has a structured image part."""
    return bool(_images(_turn(index, message, False) for index, message in enumerate(messages)))


def _newest_turn(messages: Sequence[Any]) -> int:
    """Number of the first message that no answer followed yet; one to be continued is none."""
    first = len(messages)
    while first and _role(messages[first - 1]) == "assistant":
        first -= 1
    while first and _role(messages[first - 1]) != "assistant":
        first -= 1
    return first


def _images(turns: Iterable[_Turn]) -> list[tuple[list[Any], int, ImagePart]]:
    """(parts, index in them, image) of every image, in order."""
    return [
        (turn.parts, index, part)
        for turn in turns
        if turn.parts is not None
        for index, part in enumerate(turn.parts)
        if isinstance(part, ImagePart)
    ]


def _turn(index: int, message: Any, earlier: bool) -> _Turn:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, (str, Mapping)) or not isinstance(content, Iterable):
        return _Turn(message, None)
    try:
        parts = list(content)
    except ValueError as error:  # pydantic's, which checks the parts only now
        reason = " ".join(str(error).split())
        raise RuleError(f"messages[{index}].content: {reason[:_LONGEST_REASON]}") from error
    if isinstance(message, dict) and not isinstance(content, (list, tuple)):
        message["content"] = parts  # validation leaves an iterator, which others read after us
    for position, part in enumerate(parts):
        if is_image(part):
            where = f"messages[{index}].content[{position}]"
            parts[position] = ImagePart(where, part, earlier)
    return _Turn(message, parts)


def _resolve_tool_images(turns: list[_Turn], mode: str) -> list[_Turn]:
    if mode == "refuse":
        return turns
    resolved: list[_Turn] = []
    waiting: list[Any] = []
    moved = 0
    for turn in [*turns, _Turn({"role": None}, None)]:
        if turn.role != "tool" and waiting:
            if turn.role == "user":
                content = [turn.message.get("content")] if turn.parts is None else turn.parts
                turn = _Turn(turn.message, [*waiting, *(p for p in content if p is not None)])
            else:
                resolved.append(_Turn({"role": "user"}, waiting))
            waiting = []
        resolved.append(turn)
        for parts, index, image in _images([turn] if turn.role == "tool" else []):
            if mode == "note":
                parts[index] = TOOL_IMAGE_NOTE
                continue
            # Results may come in another order than their calls, and the encoder sorts them by
            # call: the number ties each image to its result wherever both end up.
            moved += 1
            parts[index] = MOVED_NOTE.format(moved)
            waiting += [MOVED_LABEL.format(moved), image]
    return resolved[:-1]


def _check_role(turn: _Turn) -> None:
    for part in turn.parts or ():
        if isinstance(part, ImagePart) and turn.role not in _IMAGE_ROLES:
            advice = "Move it into a user message."
            if turn.role == "tool":
                advice = (
                    "Send it in a user message after the tool results, or start the server with "
                    f"{settings.TOOL_IMAGES.name}=move (it is shown in the next user turn) or "
                    f"{settings.TOOL_IMAGES.name}=note (a text note replaces it)."
                )
            raise RuleError(
                f"{part.where}: a message with role {turn.role!r} cannot hold an image, "
                f"only user messages can. {advice}"
            )


def _resolve_overflow(turns: list[_Turn], policy: Policy) -> None:
    places = _images(turns)
    if policy.limit is None or len(places) <= policy.limit:
        return
    if policy.overflow == "refuse":
        raise RuleError(
            f"The request has {len(places)} images, the limit is {policy.limit} "
            f"({LIMIT_FLAG} '{{\"image\": {policy.limit}}}'). Send fewer images, raise the limit, "
            f"or start the server with {settings.IMAGE_OVERFLOW.name}=keep-newest, which replaces "
            "the oldest by text notes."
        )
    for parts, index, _ in places[: len(places) - policy.limit]:
        parts[index] = OVERFLOW_NOTE


def _rebuilt(turn: _Turn) -> Any:
    if turn.parts is None:
        return turn.message
    texts = [_text(part) for part in turn.parts]
    if any(text is None and part is not None for text, part in zip(texts, turn.parts, strict=True)):
        return {**turn.message, "content": turn.parts}  # a part that vLLM must judge
    return {**turn.message, "content": SEPARATOR.join(text for text in texts if text is not None)}


def _text(part: Any) -> str | None:
    """The text of a part; None for one that is not text. A text part may hold None: empty."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXT_KEYS:
        return None
    value = part.get(_TEXT_KEYS[kind])
    return value if isinstance(value, str) else None
