"""What kind of machine a vLLM was built for, told by the installation and never by this machine."""

from __future__ import annotations

import os
import re

_INFO = re.compile(r"vllm(?:_(cpu|rocm|xpu|tpu))?-([^-]+)\.dist-info")
_VERSION = re.compile(r"^(?:__version__\s*=\s*)?version\s*=\s*['\"]([^'\"]+)", re.MULTILINE)
_KINDS = (("rocm", "ROCm"), ("xpu", "XPU"), ("tpu", "TPU"), ("cpu", "CPU"))
#: Folder of a model's package that a platform imports; every other platform imports the default.
FOLDERS = {"rocm": "amd"}
DEFAULT = "nvidia"
# What only builds for one platform compile or bring along: a start of a file's name.
_ROCM_FILE = "_rocm_C."
_CUDA_ONLY = ("_flashmla_C.", "_flashmla_extension_C.", "_qutlass_C.")
_CUDA_FILES = ("_C.", "_C_stable_libtorch.", "_moe_C.")
_XPU_PACKAGE = "vllm_xpu_kernels"


class Platform:
    """`name` as vLLM's own platforms have it, "cuda" where nothing speaks for another; `evidence`
    is what tells."""

    __slots__ = ("evidence", "name")

    def __init__(self, name: str, evidence: str = "") -> None:
        self.name = name
        self.evidence = evidence

    @property
    def label(self) -> str:
        """The platform's name as people write it."""
        return dict(_KINDS).get(self.name, "CUDA")

    @property
    def folder(self) -> str:
        """The folder that this platform imports of a package with one for each."""
        return FOLDERS.get(self.name, DEFAULT)


def of(vllm_root: str) -> Platform:
    """The platform of an installed vLLM: its compiled files decide, then the label of its version.

    Labels are as in `1.2.3+rocm700`, `+xpu`, `+cpu`: vLLM's setup.py, get_vllm_version.
    """
    site = os.path.dirname(vllm_root)
    own, beside = _listed(vllm_root), _listed(site)
    for kind, start in (("rocm", _ROCM_FILE), ("cuda", _CUDA_ONLY)):
        compiled = [name for name in own if name.startswith(start)]
        if compiled:
            return Platform(kind, compiled[0])
    for found in map(_INFO.fullmatch, beside):
        if found:
            name = found.group(1) or _labelled(found.group(2))
            if name:
                return Platform(name, found.group(0))
    version = _own_version(vllm_root)
    name = _labelled(version)
    if name:
        return Platform(name, f"version {version}")
    if _XPU_PACKAGE in beside and not any(entry.startswith(_CUDA_FILES) for entry in own):
        return Platform("xpu", _XPU_PACKAGE)
    return Platform("cuda")


def imports(name: str, path: str) -> bool:
    """Whether the platform of this name may import a file: not one in another platform's folder."""
    own = Platform(name).folder
    others = {DEFAULT, *FOLDERS.values()} - {own}
    return not others & set(path.split("/")[:-1])


def notes(vllm_root: str, package: str, platform: Platform) -> tuple[str, ...]:
    """What a person should know of the platforms that `package`, a folder, has code for."""
    folders = (DEFAULT, *FOLDERS.values(), "xpu", "cpu")
    there = [n for n in folders if os.path.isfile(os.path.join(vllm_root, package, n, "model.py"))]
    found = []
    if platform.folder in there:
        evidence = f" ({platform.evidence})" if platform.evidence else ""
        idle = [n for n in there if n in (DEFAULT, *FOLDERS.values()) and n != platform.folder]
        patched = "".join(f"; {package}/{n} is patched too, and not imported here" for n in idle)
        uses = f"this build for {platform.label}{evidence} uses {package}/{platform.folder}"
        found.append(uses + patched)
    if platform.name == "rocm":
        found.append("image input on AMD GPUs was not run on AMD hardware")
    others = [f"{package}/{n}" for n in there if n in ("xpu", "cpu")]
    if others:
        found.append(f"{', '.join(others)}: not touched; those platforms stay text-only")
    if platform.name == "cpu":
        found.append(
            f"a build for CPUs ({platform.evidence}), which imports {package}/nvidia too: "
            "patched as any other; the model itself needs a GPU"
        )
    return tuple(found)


def _labelled(version: str) -> str:
    parts = re.split(r"[._-]", version.partition("+")[2].lower())
    return next((name for name, _ in _KINDS for part in parts if part.startswith(name)), "")


def _own_version(vllm_root: str) -> str:
    try:
        with open(os.path.join(vllm_root, "_version.py"), encoding="utf-8") as file:
            found = _VERSION.search(file.read())
    except (OSError, UnicodeDecodeError):
        return ""
    return found.group(1) if found else ""


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
