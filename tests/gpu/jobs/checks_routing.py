"""The routing kernel on a GPU: equal to the reference, capturable, free of synchronisation.

    python tests/gpu/jobs/checks_routing.py [--batches 10000] [--out report.json]

Needs torch with CUDA and Triton, not vLLM. Prints a table; exit 1 if a row of it failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from vision_exp import layout
from vision_exp.routing.reference import mm_topk_reference
from vision_exp.routing.topk import mm_topk

SCALE = 1.5
VOCAB = 129280
#: Two biased scores this close, relative to their size, may change places in float32: each comes
#: from a score with a relative error of a few 1e-7 and one addition.
NEAR = 2e-6
WEIGHTS = 1e-5


class Batch:
    """Arguments of mm_topk on the GPU, at most `rows` rows."""

    def __init__(self, generator: random.Random, experts, top_k, dtype, ids_dtype, hashed) -> None:
        rows = generator.choice((1, 2, 3, 7, 16, 33, 64, 100, 256))
        self.logits = torch.randn(rows, experts, device="cuda") * generator.choice((0.5, 4, 30))
        self.bias, self.bias_vl = torch.randn(2, experts, device="cuda")
        if generator.random() < 0.25:  # many ties
            self.logits = self.logits.round()
            self.bias, self.bias_vl = self.bias.round(), self.bias_vl.round()
        self.logits = self.logits.to(dtype)
        self.mask = torch.rand(rows, device="cuda") < generator.choice((0.0, 0.3, 0.9, 1.0))
        self.keywords: dict[str, Any] = {"top_k": top_k, "scale": SCALE}
        if hashed:
            self.bias = None
            order = torch.rand(997, experts, device="cuda").argsort(1)
            self.keywords["tid2eid"] = order[:, :top_k].contiguous().to(ids_dtype)
            self.keywords["token_ids"] = torch.randint(0, 997, (rows,), device="cuda").to(ids_dtype)
        self.ids_dtype = ids_dtype

    @property
    def arguments(self) -> tuple:
        return self.logits, self.bias, self.bias_vl, self.mask

    def kernel(self) -> tuple[torch.Tensor, torch.Tensor]:
        return mm_topk(*self.arguments, **self.keywords, ids_dtype=self.ids_dtype)

    def errors(self) -> torch.Tensor:
        """(wrong ids, rows that swapped a near tie, largest relative weight error)."""
        weights, ids = self.kernel()
        _, exact = mm_topk_reference(*self.arguments, **self.keywords, dtype=torch.float64)
        scores = torch.nn.functional.softplus(self.logits.double()).sqrt()
        text = self.bias_vl if self.bias is None else self.bias
        biased = scores + torch.where(self.mask[:, None], self.bias_vl, text)
        found = biased.gather(1, ids.long().clamp(0, self.logits.shape[1] - 1))
        wanted = biased.gather(1, exact)
        gap = (found - wanted).abs() / wanted.abs().clamp(min=1)
        differs = ids.long() != exact
        # A swap of equal values is a wrong tie, and a hash row has nothing to swap.
        allowed = differs & (gap > 0) & (gap < NEAR)
        if self.bias is None:
            allowed &= self.mask[:, None]
        chosen = scores.gather(1, ids.long())
        exact_weights = chosen / chosen.sum(1, keepdim=True) * SCALE
        error = ((weights - exact_weights).abs() / exact_weights.clamp(min=1e-6)).max()
        wrong = (differs & ~allowed).sum() + (ids.dtype != self.ids_dtype)
        return torch.stack((wrong.double(), allowed.any(1).sum().double(), error))


def variants() -> itertools.cycle:
    types = [(d, i) for d in (torch.float32, torch.bfloat16) for i in (torch.int32, torch.int64)]
    top_ks = (6, 1, 8)
    return itertools.cycle(
        (experts, top_k, dtype, ids, hashed)
        for top_k in top_ks
        for experts in (256, 384)
        for hashed in (False, True)
        for dtype, ids in types
    )


def random_batches(count: int) -> str:
    generator = random.Random(0)
    torch.manual_seed(0)
    totals = torch.zeros(3, dtype=torch.float64, device="cuda")
    rows = 0
    for _, variant in zip(range(count), variants(), strict=False):
        batch = Batch(generator, *variant)
        errors = batch.errors()
        totals = torch.cat((totals[:2] + errors[:2], torch.maximum(totals[2:], errors[2:])))
        rows += len(batch.mask)
    wrong, swapped, error = totals.tolist()
    if wrong or not error < WEIGHTS:
        raise AssertionError(f"{wrong:.0f} wrong ids, weight error {error:.2e}")
    return f"{count} batches, {rows} rows; {swapped:.0f} rows swap a near tie; weights {error:.1e}"


def special_rows() -> str:
    logits = torch.randn(8, 256, device="cuda")
    logits[0], logits[1], logits[2], logits[3] = float("nan"), float("inf"), -float("inf"), 0.5
    logits[4, 3] = float("nan")
    logits[5, 250:] = 3e38
    bias, bias_vl = torch.randint(0, 4, (2, 256), device="cuda").float()
    mask = torch.arange(8, device="cuda") % 2 == 0
    for _ in range(2):
        mask = ~mask
        found = mm_topk(logits, bias, bias_vl, mask, top_k=6, scale=SCALE)
        wanted = mm_topk_reference(logits, bias, bias_vl, mask, top_k=6, scale=SCALE)
        same = torch.equal(found[1].long(), wanted[1])
        torch.testing.assert_close(found[0], wanted[0], atol=1e-6, rtol=1e-5, equal_nan=True)
        if not same or found[1].min() < 0 or found[1].max() > 255:
            raise AssertionError(f"{found[1].tolist()} != {wanted[1].tolist()}")
    return "NaN, infinite, tied and huge rows equal the reference, in range"


def graph_replay() -> str:
    count = 0
    for rows, hashed in itertools.product((1, 33, 2048), (False, True)):
        logits = torch.randn(rows, 256, device="cuda")
        bias, bias_vl = torch.randn(2, 256, device="cuda")
        tokens = torch.randint(0, 128000, (rows,), dtype=torch.int32, device="cuda")
        table = torch.randint(0, 256, (VOCAB, 6), dtype=torch.int32, device="cuda")
        keywords: dict[str, Any] = {"top_k": 6, "scale": SCALE}
        if hashed:
            keywords |= {"tid2eid": table, "token_ids": tokens}

        def routed(logits=logits, bias=bias, bias_vl=bias_vl, tokens=tokens, keywords=keywords):
            return mm_topk(logits, bias, bias_vl, layout.image_token_mask(tokens), **keywords)

        routed()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = routed()
        for _ in range(20):
            logits.normal_()
            tokens.random_(0, 128000)
            tokens[torch.rand(rows, device="cuda") < 0.5] = layout.SENTINEL_FIRST + 2
            graph.replay()
            eager = routed()
            if not all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True)):
                raise AssertionError(f"replay differs from eager: rows={rows} hash={hashed}")
            count += 1
    return f"{count} replays with new data equal eager runs bit for bit"


def no_synchronisation() -> str:
    generator = random.Random(1)
    batches = [
        Batch(generator, 256, 6, torch.float32, torch.int32, hashed) for hashed in (False, True)
    ]
    tokens = torch.randint(0, VOCAB, (64,), dtype=torch.int32, device="cuda")
    for batch in batches:
        batch.kernel()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            batch.kernel()
        layout.image_token_mask(tokens)
        try:
            tokens[0].item()
        except RuntimeError:
            return "set_sync_debug_mode('error') stays silent (and does see an .item())"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    raise AssertionError("the debug mode did not see an .item()")


def deterministic() -> str:
    batch = Batch(random.Random(2), 256, 6, torch.float32, torch.int32, False)
    first = batch.kernel()
    for _ in range(200):
        if not all(torch.equal(a, b) for a, b in zip(first, batch.kernel(), strict=True)):
            raise AssertionError("two runs on the same input differ")
    return "200 runs on one input are equal bit for bit"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checks: dict[str, Callable[[], str]] = {
        "random batches": lambda: random_batches(options.batches),
        "special rows": special_rows,
        "graph replay": graph_replay,
        "no synchronisation": no_synchronisation,
        "deterministic": deterministic,
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = []
    for name, check in checks.items():
        start = time.monotonic()
        try:
            ok, detail = True, check()
        except Exception as error:  # noqa: BLE001  a row of the table, and the exit status
            ok, detail = False, f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - start, 1)
        rows.append({"name": f"routing: {name}", "ok": ok, "seconds": seconds, "detail": detail})
        print(f"{'ok' if ok else 'FAIL':5} {name:20} {seconds:6.1f} s  {detail}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
