"""The notes that a run leaves: the folder `.vision-exp`, and what lies where in it.

`vllm_root` is the vLLM package folder. Every path below it is spelled here and nowhere else.
"""

from __future__ import annotations

import os

FOLDER = ".vision-exp"


def folder(vllm_root: str) -> str:
    """All notes about one vLLM; beside an overlay, where a tree waits to be put in place."""
    return os.path.join(vllm_root, FOLDER)


def receipt_path(vllm_root: str) -> str:
    """What was applied."""
    return os.path.join(vllm_root, FOLDER, "receipt.json")


def journal_path(vllm_root: str) -> str:
    """What an open transaction is about to do."""
    return os.path.join(vllm_root, FOLDER, "journal.json")


def lock_path(vllm_root: str) -> str:
    """Held by the run that writes."""
    return os.path.join(vllm_root, FOLDER, "lock")


def undo_folder(vllm_root: str) -> str:
    """Bytes that an open transaction replaces."""
    return os.path.join(vllm_root, FOLDER, "undo")


def originals_folder(vllm_root: str) -> str:
    """Target files as they were before the hotfix, for a person who has to help by hand."""
    return os.path.join(vllm_root, FOLDER, "originals")


def original_path(vllm_root: str, path: str) -> str:
    """The original of the target file `path`, which is relative to the package."""
    return os.path.join(originals_folder(vllm_root), path.replace("/", "__"))


def is_interrupted(vllm_root: str) -> bool:
    """Whether a journal says that a transaction is open."""
    return os.path.lexists(journal_path(vllm_root))
