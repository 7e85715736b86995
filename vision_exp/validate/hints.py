"""What to do after a server could not be used."""

from __future__ import annotations

import dataclasses
import shlex
from urllib.parse import urljoin

from vision_exp.validate.client import Busy, Refused, TooLate
from vision_exp.validate.reply import BadReply
from vision_exp.validate.usage import COMMAND, EXAMPLE, LONGEST_TIMEOUT, NO_SERVER, Options, Stop

#: Statuses that are about the caller, not about the picture that went along.
WHO = (401, 403, 404)


class NoPicture(Exception):
    """The server answered text, and refused the same with a picture."""

    def __init__(self, url: str, model: str, error: Refused) -> None:
        does = "fails at a" if error.status >= 500 else "takes no"
        super().__init__(f"{url}: the model {model} answers text but {does} picture: {error}")
        self.status = error.status


def no_server(options: Options, error: Exception) -> Stop:
    """The end of a run that could not begin."""
    told = str(error)
    if isinstance(error, Refused):  # alone of these it does not name the URL
        told = f"{options.url} answers {error}"
    return Stop(NO_SERVER, f"no usable server: {told}. Nothing was checked.", _next(options, error))


def _next(options: Options, error: Exception) -> str:
    if isinstance(error, BadReply):
        return f"{COMMAND} --url {EXAMPLE}   (the base URL of an OpenAI-compatible chat server)"
    if isinstance(error, TooLate):
        longer = min(LONGEST_TIMEOUT, max(600, 2 * options.timeout))
        slow = dataclasses.replace(options, timeout=longer)
        return f"{slow.again}   (if the server is only slow; else see its log)"
    if isinstance(error, Busy):
        return f"{options.again}   (later: the server is busy)"
    status = error.status if isinstance(error, (Refused, NoPicture)) else 0
    if status >= 500:
        return f"{options.again}   (once the server's log has told why, and that is mended)"
    if isinstance(error, NoPicture):
        return (
            "python3 hotfix.py status   (is vLLM patched, the model a Vision-Exp one, and the "
            "server started with --limit-mm-per-prompt '{\"image\":16}'?)"
        )
    if isinstance(error, Refused) and 300 <= status < 400 and error.location:
        asked = f"{options.url}/models"
        base = urljoin(asked, error.location).removesuffix("/models")
        return f"{COMMAND} --url {shlex.quote(base)}   (if you trust where the redirect leads)"
    if status in (401, 403):
        return f"{options.again} --api-key KEY"
    if status == 404 and not options.url.endswith("/v1"):
        return f"{COMMAND} --url {EXAMPLE}   (the base URL, up to and with /v1)"
    if status == 404 and options.model:
        return f"curl {options.url}/models   (has the names that --model takes)"
    return (
        f"curl {options.url}/models   (must list the models; else start the server, or mend --url)"
    )
