"""What to do after a server could not be used."""

from __future__ import annotations

import shlex
from urllib.parse import urljoin

from vision_exp.validate.client import Busy, Refused, ServerError, TooLate
from vision_exp.validate.output import NO_SERVER, Stop
from vision_exp.validate.reply import BadReply
from vision_exp.validate.usage import COMMAND, EXAMPLE, LONGEST_TIMEOUT, Options

#: Statuses that are about the caller, not about the image that went along.
WHO = (401, 403, 404)


class NoImages(ServerError):
    """The server answered text, and refused the same with an image."""

    def __init__(self, url: str, model: str, error: Refused) -> None:
        does = "fails at an" if error.status >= 500 else "takes no"
        super().__init__(f"{url}: the model {model} answers text but {does} image: {error.reply}")
        self.status = error.status


def no_server(options: Options, error: ServerError) -> Stop:
    """The end of a run that could not begin."""
    words = f"no usable server: {error}. Nothing was checked."
    return Stop(NO_SERVER, words, "   ".join(_next(options, error)))


def _next(options: Options, error: ServerError) -> tuple[str, ...]:
    """A command, and what is to be known of it."""
    status = error.status if isinstance(error, (Refused, NoImages)) else 0
    if isinstance(error, BadReply):
        return f"{COMMAND} {EXAMPLE}", "(the base URL of an OpenAI-compatible chat server)"
    if isinstance(error, TooLate):
        longer = min(LONGEST_TIMEOUT, max(600, 2 * options.timeout))
        return options.again(timeout=longer), "(if the server is only slow; else see its log)"
    if isinstance(error, Busy):
        return options.again(), "(later: the server is busy)"
    if status >= 500:
        return options.again(), "(once the server's log has told why, and that is fixed)"
    if isinstance(error, NoImages):
        flag = "--limit-mm-per-prompt '{\"image\":16}'"
        question = "(is vLLM patched, the model a Vision-Exp one, and the server started with"
        return "python3 hotfix.py status", f"{question} {flag}?)"
    if isinstance(error, Refused) and 300 <= status < 400 and error.target:
        base = urljoin(f"{options.url}/models", error.target).removesuffix("/models")
        return f"{COMMAND} --url {shlex.quote(base)}", "(if you trust where the redirect leads)"
    if status in (401, 403):
        return (options.again(api_key="KEY"),)
    if status == 404 and not options.url.endswith("/v1"):
        return f"{COMMAND} {EXAMPLE}", "(the base URL, up to and with /v1)"
    if status == 404 and options.model:
        return f"curl {options.url}/models", "(has the names that --model takes)"
    question = "(must list the models; else start the server, or correct --url)"
    return f"curl {options.url}/models", question
