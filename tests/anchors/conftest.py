"""Every harmless or broken edit is applied to a release of its own, with all its syncs."""

from memory_folders import tmp_path, tmp_path_factory

__all__ = ["tmp_path", "tmp_path_factory"]
