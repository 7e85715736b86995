"""How vLLM was installed, which GPUs are here, and what their attention code allows."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass

SWA = "v1/attention/backends/mla/sparse_swa.py"
_NAME = re.compile(r"vllm(_cpu)?-[^-]+\.dist-info")


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU here: its name and compute capability, "9.0" for Hopper."""

    name: str
    capability: str


def installed_by(vllm_root: str) -> str:
    """What installed the package, from its dist-info; how an editable one was is said too."""
    site = os.path.dirname(vllm_root)
    infos = [name for name in _listed(site) if _NAME.fullmatch(name)]
    if not infos:
        return "no dist-info beside it: a checkout, or copied by hand"
    folder = os.path.join(site, sorted(infos)[-1])
    tool = _read(os.path.join(folder, "INSTALLER")).strip() or "unknown tool"
    origin = _read(os.path.join(folder, "direct_url.json"))
    try:
        url = json.loads(origin) if origin else {}
    except ValueError:
        url = {}
    editable = isinstance(url, dict) and url.get("dir_info", {}).get("editable")
    shared = os.stat(os.path.join(vllm_root, "__init__.py")).st_nlink > 1
    words = [f"installed by {tool}"]
    words += ["editable"] if editable else []
    words += ["files hard-linked from a cache (replaced, not written through)"] if shared else []
    return ", ".join(words)


def gpus() -> tuple[Gpu, ...]:
    """Kinds of GPU that the driver lists; none where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        child = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [line.rsplit(",", 1) for line in child.stdout.splitlines() if "," in line]
    return tuple(dict.fromkeys(Gpu(row[0].strip(), row[1].strip()) for row in rows))


def attention(capability: str, swa_source: bytes | None) -> str:
    """Attention classes that vLLM may choose on a GPU, and what visibility they allow."""
    if swa_source is None:
        return f"unknown: {SWA} is missing"
    if b"prefill_swa_indices" not in swa_source:
        return (
            "causal: this release's sliding-window metadata has no prefill index rows, "
            "so image tokens cannot see both ways"
        )
    major = capability.partition(".")[0]
    if major == "9":
        return "FlashMLA: bidirectional"
    if major == "10":
        return "FlashMLA or FlashInfer: bidirectional; the server's log says which"
    if major == "12":
        return (
            "FlashInfer SM120: bidirectional where its kernel takes rows of window + 384; "
            "checked at start-up, see the server's log"
        )
    return "unknown for this GPU; the server's log says what holds"


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""
