"""How vLLM was installed, and which GPUs are here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass

_NAME = re.compile(r"vllm(_cpu)?-[^-]+\.dist-info")

_EPS = re.compile(r"^MHC_SUPPORTED_RMS_EPS\s*=\s*\(([\d.e+\-, ]*)\)", re.MULTILINE)


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


def mhc_eps(site_packages: str) -> str:
    """The rms_norm_eps that an installed b12x's fused MHC kernel takes; empty if none says so."""
    found = _EPS.search(_read(os.path.join(site_packages, "b12x", "norm", "mhc", "_impl.py")))
    return (
        ", ".join(f"{float(each):g}" for each in found[1].split(",") if each.strip())
        if found
        else ""
    )


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
