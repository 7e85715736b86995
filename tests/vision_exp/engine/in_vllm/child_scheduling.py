"""Runs in one vLLM release: its real scheduler, KV cache manager and requests, with image blocks.

Prints one JSON object as its last line: check name -> what was seen (see observations.py).
"""

from __future__ import annotations

import checks_retention
import checks_scheduling as checks
import observations

from vision_exp.engine import hooks


def main() -> None:
    hooks.install()
    hooks.install()
    observations.report(
        checks.every_offset,
        checks.cached_image,
        checks.at_chunk_start,
        checks.prefix_hits,
        checks.stock_hit,
        checks_retention.retention,
        checks.connector_hits,
        checks.window_rows,
        checks.never_fits,
        checks.text_untouched,
        checks.refusal,
        checks.with_draft,
    )


if __name__ == "__main__":
    main()
