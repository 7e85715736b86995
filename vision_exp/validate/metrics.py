"""What a server still holds once its requests have ended, by vLLM's `/metrics`."""

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from vision_exp.validate.client import Client, Refused
from vision_exp.validate.judge import Verdict

#: What ended requests may not hold. vLLM 0.22 to 0.29 and later have these names.
HELD = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "KV cache in use",
}
CACHE = "mm_cache_hits_total", "mm_cache_queries_total"
_LINE = re.compile(rf"^vllm:({'|'.join((*HELD, *CACHE))})(?:\{{.*\}})? (\S+)$", re.MULTILINE)
#: Seconds that a server has to notice that clients are gone.
PATIENCE = 10.0


async def read(client: Client) -> Counter[str]:
    """The gauges by name, summed over engines. Raises ServerError."""
    root = dataclasses.replace(client, url=client.url.removesuffix("/v1"))
    text = (await root.fetch("/metrics"))[0].decode(errors="replace")
    found: Counter[str] = Counter()
    for name, value in _LINE.findall(text):
        found[name] += float(value)  # type: ignore[assignment]
    return found


async def at_rest(client: Client, before: Counter[str]) -> tuple[Counter[str], list[str]]:
    """The gauges as soon as none of `HELD` is above ``before``, or the last; and which are."""
    end = asyncio.get_running_loop().time() + PATIENCE
    while True:
        found = await read(client)
        above = [words for name, words in HELD.items() if found[name] > before[name] + 1e-9]
        if not above or asyncio.get_running_loop().time() > end:
            return found, above
        await asyncio.sleep(0.1)


async def left(client: Any, disturb: Callable[[Any], Awaitable[Verdict]]) -> Verdict:
    """Whether the server is as empty after ``disturb`` as before."""
    what = "requests at the server and its KV cache in use, before and after "
    try:
        before, above = await at_rest(client, Counter())
    except Refused as error:
        return Verdict(None, f"{what}it was hung up on", f"it shows no metrics: {error.reply}")
    if not before.keys() >= HELD.keys():
        missing = "its metrics lack vLLM's gauges: was it started with --disable-log-stats?"
        return Verdict(None, f"{what}it was hung up on", missing)
    if above and above != [HELD["kv_cache_usage_perc"]]:
        return Verdict(None, f"{what}it was hung up on", "other clients' requests are at it")
    good, how, detail = await disturb(client)
    if not good:
        return Verdict(good, what + how, detail)
    after, above = await at_rest(client, before)
    shown = ", ".join(f"{words} {before[n]:g} and {after[n]:g}" for n, words in HELD.items())
    hits, queries = (after[name] - before[name] for name in CACHE)
    shown += f"; of {queries:g} images {hits:g} were in the cache of processed ones"
    return Verdict(not above, what + how, f"left: {', '.join(above)}; {shown}" if above else shown)
