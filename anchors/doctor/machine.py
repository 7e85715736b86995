"""What each part of the model runs on here, why, and how that is known: one table for a machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from anchors.digests import read_file
from anchors.doctor.verdict import BROKEN, DEGRADED, Finding
from anchors.releases import flashinfer, known
from anchors.releases.flashinfer import FlashInfer

SWA = "v1/attention/backends/mla/sparse_swa.py"
ALIGNMENT = "v1/attention/backends/mla/compressor_utils.py"
B12X = "models/deepseek_v4/nvidia/b12x.py"

#: sliding_window and vision_max_n_token of the released checkpoint; query heads of one rank.
WINDOW, IMAGE = 128, 384
HEADS = (8, 16, 32, 64)
#: The first FlashInfer with kernels for DSpark's rows.
DRAFTING_FROM = "0.6.18"

_RUN = "run on H200"
_READ = "never run there: kernel sources, and arithmetic on CPU"
_CDIV = re.compile(rb"noncausal_index_width\s*=\s*\(\s*cdiv\([^,]*,\s*(\d+)\)")
_CONSTANT = re.compile(rb"^_DSPARK_SWA_INDEX_ALIGNMENT\s*=\s*(\d+)", re.MULTILINE)
_CLASSES = {
    "9": ("DeepseekV4FlashMLAAttention", "FlashAttention 3"),
    "10": ("DeepseekV4FlashMLAAttention", "FlashAttention 4"),
    "12": ("DeepseekV4FlashInferSM120Attention", "FlashAttention 2"),
}


@dataclass(frozen=True)
class Row:
    """`part` of the model, `what` runs it here, and `why` with how it is known."""

    part: str
    what: str
    why: str


@dataclass(frozen=True)
class Installed:
    """`swa`, `alignment`: vLLM's files of these names; `b12x`: a fork's own attention class."""

    flashinfer: FlashInfer
    swa: bytes | None
    alignment: bytes | None = None
    b12x: bool = False


def rows(capability: str, here: Installed) -> tuple[Row, ...]:
    """The table for a GPU of compute capability `capability`, "12.1" for a DGX Spark."""
    major = capability.partition(".")[0]
    if major not in _CLASSES:
        return (Row("attention", "unknown for this GPU", "the server's log says what holds"),)
    attention, tower = _CLASSES[major]
    proof = _RUN if major == "9" else _READ
    why = "vLLM's choice for SM12x" if major == "12" else "vLLM's choice; FlashInfer on request"
    experts = "vLLM's choice; bias_vl for image rows"
    refused = "a kernel that selects experts itself is refused at start: --moe-backend marlin"
    return (
        Row("attention", attention, f"{why}; {proof}"),
        Row("experts", experts, f"{refused}; {proof}"),
        _visibility(major, here, proof),
        _drafting(major, here, proof),
        Row(
            "tower attention",
            f"{tower}, Triton or torch",
            f"the fastest that is right, tried at start; see the log; {proof}",
        ),
    )


def _visibility(major: str, here: Installed, proof: str) -> Row:
    if here.swa is None:
        return Row("visibility", "unknown", f"{SWA} is missing")
    if b"prefill_swa_indices" not in here.swa:
        why = "this release's sliding-window metadata has no prefill index rows"
        return Row("visibility", "causal", why)
    if here.b12x:
        why = "this fork may choose its b12x attention, whose rows are widened; docs/machines.md"
        return Row("visibility", "bidirectional or causal", f"{why}; the log says which; {_READ}")
    if major != "12":
        return Row("visibility", "bidirectional", proof)
    takes, name = here.flashinfer.takes(HEADS, WINDOW + IMAGE), _named(here)
    if takes is None:
        return Row("visibility", "unknown", f"{name} says nothing about its kernels; see the log")
    if not takes:
        return Row("visibility", "causal", f"{name} has no kernel for {WINDOW + IMAGE} keys")
    return Row("visibility", "bidirectional", f"{name} takes {WINDOW + IMAGE} keys; {proof}")


def _drafting(major: str, here: Installed, proof: str) -> Row:
    if major != "12":
        return Row("drafting", "DSpark", proof)
    keys, name = draft_keys(here), _named(here)
    if keys is None:
        return Row("drafting", "unknown", "this vLLM's rows of a draft are not understood")
    takes = here.flashinfer.takes(HEADS, keys)
    if takes is None:
        return Row("drafting", "unknown", f"{name} says nothing about its kernels")
    if not takes:
        why = f"{name} has no kernel for the {keys} keys of its rows"
        return Row("drafting", "none: a server with it dies at start", f"{why}; {remedy()}")
    return Row("drafting", "DSpark", f"{name} takes the {keys} keys of its rows; {proof}")


def remedy() -> str:
    """What makes drafting possible on SM12x."""
    return (
        f"use vLLM {known.DRAFTS_ON_SM12X}, install flashinfer-python {DRAFTING_FROM}, "
        "or serve without --speculative-config"
    )


def draft_keys(here: Installed) -> int | None:
    """Keys of a row of DSpark's draft in this vLLM: the window and the draft's tokens, rounded up.

    The same for every legal number of draft tokens. None where the source is another.
    """
    found = _CDIV.search(here.swa or b"") or _CONSTANT.search(here.alignment or b"")
    if found is None:
        return None
    step = int(found[1])
    return -(-(WINDOW + 1) // step) * step


def findings(capability: str, here: Installed, *, native: bool) -> list[Finding]:
    """What of a GPU's table makes a server worse than the model can be, or keeps it from starting.

    native: this vLLM serves the model itself, and the table, which is the hotfix's, says nothing.
    """
    if native:
        reason = of_native(here) if capability.startswith("12.") else ""
        return [Finding(BROKEN, reason, "docs/machines.md")] if reason else []
    found = []
    for row in rows(capability, here):
        if row.part == "visibility" and row.what == "causal":
            found.append(
                Finding(DEGRADED, f"image tokens are causal: {row.why}", "docs/machines.md")
            )
        if row.part == "drafting" and row.what.startswith("none"):
            found.append(Finding(DEGRADED, f"no drafting with DSpark: {row.why}", remedy()))
    return found


def read(vllm_root: str) -> Installed:
    """What is installed, from the sources alone."""
    files = {path: os.path.join(vllm_root, path) for path in (SWA, ALIGNMENT, B12X)}
    return Installed(
        flashinfer.installed(os.path.dirname(vllm_root)),
        read_file(files[SWA]),
        read_file(files[ALIGNMENT]),
        os.path.isfile(files[B12X]),
    )


def notes_on_native(vllm_root: str) -> list[str]:
    """What to know before serving with a vLLM that serves the model itself."""
    note = of_native(read(vllm_root))
    return [note] if note else []


def of_native(here: Installed) -> str:
    """Why a vLLM that serves the model itself does not start on SM12x; empty if nothing is known.

    Its image rows have window + image keys in prefill, where these FlashInfers have kernels for
    the window alone: https://github.com/flashinfer-ai/flashinfer/issues/5135
    """
    if here.flashinfer.form not in ("none", "pairs") or not here.flashinfer.version:
        return ""
    return (
        f"on a DGX Spark or RTX PRO 6000 (SM12x) this vLLM does not start with {_named(here)}, "
        f"whose prefill takes {WINDOW} keys and images need {WINDOW + IMAGE}: use vLLM "
        f"{known.NATIVE_ON_SM12X} or later, or vLLM {known.DRAFTS_ON_SM12X} with this hotfix"
    )


def _named(here: Installed) -> str:
    version = here.flashinfer.version
    return f"FlashInfer {version}" if version else "no FlashInfer"
