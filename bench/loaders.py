"""Whether the verdict about a draft loader is what happens when it is patched and run.

    python bench/loaders.py [COUNT]

Makes COUNT (2,000) loaders of many shapes (tests/support/loader_shapes.py). Wrong: the tool says
"in place", and the patched loader does not load. Needless: it refuses one that would load. Wanted:
none wrong, and less than 10 % of those that would load refused. Loaders that load no routing bias
even unpatched are counted apart. Prints the shapes that miss; exit 1 then.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests" / "support")]

from loader_runs import (  # noqa: E402
    candidates,
    loads_stock,
    patched,
    verdict,
    works,
)
from loader_shapes import SHAPES, Shape  # noqa: E402
from reporting import machine  # noqa: E402

COUNT, LIMIT = 2000, 0.10


def judged(source: str) -> str:
    """right, wrong, needless or refused; broken: it loads no bias as it is, whatever we say."""
    match = verdict(source)
    if not loads_stock(source):
        return "broken, accepted" if match else "broken, refused"
    if match is not None:
        return "right" if works(patched(source, match)) else "wrong"
    return "needless" if any(works(patched(source, m)) for m in candidates(source)) else "refused"


def main(count: int) -> int:
    """Prints counts, ratio, limit and machine."""
    found: dict[str, str] = {}

    @settings(
        max_examples=2 * count,  # some come twice
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(SHAPES)
    def each(shape: Shape) -> None:
        if len(found) < count and shape.source not in found:
            found[shape.source] = judged(shape.source)

    each()
    counts = Counter(found.values())
    loading = counts["right"] + counts["needless"]
    share = counts["needless"] / max(1, loading)
    for word in ("wrong", "needless"):
        for source in [s for s, w in found.items() if w == word][:5]:
            print(f"--- {word}\n{source[source.index('    def load_weights') :]}")
    print(f"{len(found)} loaders: {dict(counts)}")
    print(f"wrong: {counts['wrong']} (limit 0)")
    print(f"needless: {share:.1%} (limit {LIMIT:.0%}); {machine()}")
    return int(bool(counts["wrong"]) or share >= LIMIT)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT))
