"""Tests of crash-safe writing sync every file at every step."""

from memory_folders import tmp_path, tmp_path_factory

__all__ = ["tmp_path", "tmp_path_factory"]
