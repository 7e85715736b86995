"""The files that a judgement of a tree rests on, each read once, and their digests."""

from __future__ import annotations

import os
from collections.abc import Mapping

from anchors.digests import read_file, sha256


class Reading:
    """Reads files of one tree. `stock` are those that are known already, without our blocks.

    `digests` tells of every other file that was asked for: path -> digest, None where there is
    none.
    """

    def __init__(self, root: str, stock: Mapping[str, bytes | None]) -> None:
        self._root = root
        self._known = dict(stock)
        self.digests: dict[str, str | None] = {}

    def read(self, path: str) -> bytes | None:
        """The bytes of a file, relative to the tree; None where there is none.

        Raises OSError for one that may not be read.
        """
        if path not in self._known:
            full = os.path.join(self._root, path)
            data = read_file(full) if os.path.isfile(full) else None
            self._known[path] = data
            self.digests[path] = None if data is None else sha256(data)
        return self._known[path]
