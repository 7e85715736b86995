"""The caches that would lie after a patch: named one by one, so that nothing else is touched."""

from __future__ import annotations

import glob
import os
import sys

from anchors.errors import environment

_MODELINFOS = "vllm-models-deepseek_v4-*.json"
_SIGN = b"deepseek_v4"
# What vLLM keeps beside compiled code, with the paths of the sources it was traced from. The
# compiled code itself can be gigabytes and is not read.
_TRACED = ("computation_graph.py", "cache_key_factors.json", "model")
_CHUNK = 1 << 20


def cache_roots() -> list[str]:
    """Cache roots a server started from here may use: VLLM_CACHE_ROOT, XDG, home."""
    home = os.path.join(os.path.expanduser("~"), ".cache")
    found = [os.path.join(home, "vllm")]
    if os.environ.get("XDG_CACHE_HOME"):
        found.insert(0, os.path.join(os.environ["XDG_CACHE_HOME"], "vllm"))
    if os.environ.get("VLLM_CACHE_ROOT"):
        found.insert(0, os.path.expanduser(os.environ["VLLM_CACHE_ROOT"]))
    return list(dict.fromkeys(os.path.realpath(path) for path in found if path[:1] != "~"))


def stale(vllm_root: str, sources: list[str], *, compiled: bool) -> list[str]:
    """Entries to remove when `sources` of the vLLM change.

    `compiled` adds the torch.compile artifacts made from DeepSeek-V4 code.
    Raises HotfixError (exit 6) for an entry that could not be removed or read.
    """
    try:
        found = [entry for path in sources for entry in _byte_code(os.path.join(vllm_root, path))]
        for cache in cache_roots():
            folder = glob.escape(os.path.join(cache, "modelinfos"))
            found += sorted(glob.glob(os.path.join(folder, _MODELINFOS)))
            if compiled:
                found += _compiled(os.path.join(cache, "torch_compile_cache"))
    except OSError as error:
        raise environment(
            "cache-unreadable",
            f"a cache cannot be judged: {error.filename}: {error.strerror}. Nothing was changed.",
            hint="make it readable or remove it, then run this again",
        ) from error
    for path in found:
        if not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
            raise environment(
                "cache-not-writable",
                f"{path} would mislead the server and cannot be removed. Nothing was changed.",
                hint=f"make {os.path.dirname(path)} writable, or set VLLM_CACHE_ROOT elsewhere",
            )
    return found


def _byte_code(path: str) -> list[str]:
    """Every .pyc of one source file, for any Python and any kind of invalidation."""
    folder, name = os.path.split(path)
    stem = name.removesuffix(".py")
    places = [os.path.join(folder, "__pycache__")]
    for prefix in {os.environ.get("PYTHONPYCACHEPREFIX"), sys.pycache_prefix} - {None, ""}:
        places.append(os.path.join(os.path.abspath(str(prefix)), folder.lstrip(os.sep)))
    return [
        entry
        for place in places
        for entry in sorted(glob.glob(os.path.join(glob.escape(place), f"{stem}.*.pyc")))
    ]


def _compiled(folder: str) -> list[str]:
    entries: list[str] = []
    for base in (folder, os.path.join(folder, "torch_aot_compile")):
        if os.path.isdir(base):
            entries += [entry.path for entry in os.scandir(base) if entry.is_dir()]
    return [
        entry
        for entry in sorted(entries)
        if os.path.basename(entry) != "torch_aot_compile" and _mentions(entry)
    ]


def _mentions(entry: str) -> bool:
    for base, _, names in os.walk(entry):
        for name in sorted({*names} & {*_TRACED}):
            tail = b""
            with open(os.path.join(base, name), "rb") as file:
                while chunk := file.read(_CHUNK):
                    if _SIGN in tail + chunk:
                        return True
                    tail = chunk[-len(_SIGN) :]
    return False
