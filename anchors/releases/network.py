"""What a failed fetch means: that there is no network is not that the index lacks the package."""

from __future__ import annotations

import re

#: In what pip and urllib say when nothing answers; run.sh knows the same words.
_UNREACHABLE = re.compile(
    r"[Cc]onnection|[Cc]onnectTimeout|timed out|name resolution|[Uu]nreachable|getaddrinfo"
    r"|Name or service not known|nodename nor servname"
)


def cause(words: str) -> str:
    """One line for a person out of all that pip or urllib said."""
    if _UNREACHABLE.search(words):
        return "no network: the package index cannot be reached"
    return (words.strip().splitlines() or ["no reason was given"])[-1]
