"""Tensor parallelism over two GPUs, against one GPU.

    checks_two.py run MODE MODEL OUT.pt             MODE: one | sharded | data | drafting
    checks_two.py compare REPORT.json FOLDER LOGS   of FOLDER/two-MODE.pt and LOGS/two-MODE.log

Every mode answers the same requests several times. One GPU's repeats give the noise that the others
are held against, and drafting is held against two GPUs without it as well; rows of the tower are
compared directly, to BF16 accuracy.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.jobs.checks_draft import TRIED
from gpu.lib.answers import Answer, answer_of
from gpu.lib.capture import row_error
from gpu.lib.rig import SQUARE, WIDE, Ask, Report, random_image, skip_warmup, text_ids, with_images

REPEATS = 6
MODES: dict[str, dict[str, Any]] = {
    "one": {},
    "sharded": {"tensor_parallel_size": 2},
    "data": {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"},
    "drafting": {"tensor_parallel_size": 2},
}
#: Relative distance of the tower's rows: sums over two ranks round once more in BF16 per layer.
ROW_LIMIT = 3e-2


def asks() -> dict[str, Ask]:
    square, wide = random_image(*SQUARE, seed=1), random_image(*WIDE, seed=2)
    return {
        "text of 60": Ask(text_ids(60, 3)),
        "square image": with_images(60, [square], 40, 4),
        "wide and square image": with_images(61, [wide, square], 62, 5),
    }


def start(model: str, mode: str) -> Any:
    from vllm import LLM

    common: dict[str, Any] = {
        "kv_cache_dtype": "fp8",
        "block_size": 256,
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.12,
        "kv_cache_memory_bytes": 2 << 30,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kernel_config": {"enable_flashinfer_autotune": False, "enable_cutedsl_warmup": False},
        "seed": 0,
    }
    if mode != "drafting":
        return LLM(model=model, **common, **MODES[mode])
    for k in TRIED:
        speculation = {"method": "dspark", "num_speculative_tokens": k}
        try:
            return LLM(model=model, **common, **MODES[mode], speculative_config=speculation)
        except ValueError as error:
            if "num_speculative_tokens" not in str(error):
                raise
            print(f"k={k} refused: {error}", flush=True)
    raise ValueError(f"no number of drafted tokens of {TRIED} is taken")


def record(worker: Any) -> dict[str, Any]:
    """On a rank: keeps the tower's rows from now on. What it holds of the tower, and its digest."""
    runner = getattr(worker, "worker", worker).model_runner
    model = runner.get_model()
    plain = model.embed_multimodal
    kept: list[Any] = []

    def recorded(**kwargs: Any) -> Any:
        rows = plain(**kwargs)
        kept.extend(each.detach().float().cpu() for each in rows)
        return rows

    object.__setattr__(model, "embed_multimodal", recorded)
    object.__setattr__(model, "_kept_rows", kept)
    tower = [p for n, p in model.named_parameters() if n.startswith(("vision.", "aligner."))]
    installed = sys.modules["vision_exp.install"].installed
    size = sum(p.numel() * p.element_size() for p in tower)
    return {"bytes": size, "overlay": installed.overlay, "plan": installed.plan}


def rows_of(worker: Any) -> list[Any]:
    """On a rank: the rows kept since `record`, as arrays."""
    runner = getattr(worker, "worker", worker).model_runner
    return [rows.numpy() for rows in runner.get_model()._kept_rows]


def run(mode: str, model: str, out: str) -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    import vllm.model_executor.warmup.kernel_warmup as warmup
    from vllm import SamplingParams

    warmup._warmup_ll_bf16_router_gemm = skip_warmup
    llm = start(model, mode)
    ranks = llm.collective_rpc(record)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=20, ignore_eos=True)
    answers: dict[str, list[Answer]] = {name: [] for name in asks()}
    for _ in range(REPEATS):
        for name, ask in asks().items():
            answers[name].append(answer_of(llm.generate([ask.prompt()], params, use_tqdm=False)[0]))
    rows = [[torch.from_numpy(each) for each in rank] for rank in llm.collective_rpc(rows_of)]
    torch.save({"ranks": ranks, "answers": answers, "rows": rows}, out)
    print(f"{mode}: {ranks}, {[len(each) for each in rows]} images", flush=True)
    return 0


def compare(report_path: str, folder: str, logs: str) -> int:
    report = Report(Path(report_path))
    found: dict[str, Any] = {}
    for mode in MODES:
        path = Path(folder) / f"two-{mode}.pt"
        if path.exists():
            found[mode] = torch.load(path, weights_only=False)
        else:
            report.add(f"{mode}: ran", False, "no result")
    if "one" not in found:
        return 1
    for mode in [m for m in found if m != "one"]:
        one, other = found["one"], found[mode]
        log = Path(logs) / f"two-{mode}.log"
        report.run(f"{mode}: answers of one GPU", lambda a=one, b=other: same_answers(a, b))
        report.run(f"{mode}: rows of one GPU's tower", lambda a=one, b=other: same_rows(a, b))
        share = 1.0 if mode == "data" else 0.5
        report.run(f"{mode}: tower per rank", lambda a=one, b=other, s=share: memory(a, b, s))
        report.run(f"{mode}: one digest", lambda b=other, p=log: digests(b, p))
    if "sharded" in found and "drafting" in found:
        off, on = found["sharded"], found["drafting"]
        report.run("DSpark on and off, both on two GPUs", lambda: same_answers(off, on))
    return 0


def same_answers(one: dict[str, Any], other: dict[str, Any]) -> tuple[bool, str]:
    """Tokens seen in the first, or parting within what the first's repeats move by."""
    groups = one["answers"]
    noise = max(a.movement(b) for group in groups.values() for a in group for b in group)
    words, good = [f"its repeats move by up to {noise:.3f} nats"], True
    for name, group in groups.items():
        answers = other["answers"][name]
        first = min(a.largest_change(b) for a in group for b in answers)
        verdicts = [max(b.explained(a, noise) for a in group) for b in answers]
        good = good and all(ok for ok, _ in verdicts) and first <= noise
        worst = min(verdicts)[1]
        words.append(f"{name}: {worst}, first token's log-probabilities {first:.3f} apart")
    return good, "; ".join(words)


def same_rows(one: dict[str, Any], other: dict[str, Any]) -> tuple[bool, str]:
    reference = one["rows"][0]
    count = min(len(reference), *(len(rank) for rank in other["rows"]))
    if count == 0:
        return False, "the tower's rows were not recorded"
    # Encoded images are cached, so each appears once, in the order of the requests.
    errors = [
        float(row_error(rank[index], reference[index]).max())
        for rank in other["rows"]
        for index in range(count)
    ]
    equal = all(
        torch.equal(rank[index], other["rows"][0][index])
        for rank in other["rows"]
        for index in range(count)
    )
    detail = f"{count} images, rows at most {max(errors):.4f} apart, ranks alike: {equal}"
    return max(errors) <= ROW_LIMIT and equal, detail


def memory(one: dict[str, Any], other: dict[str, Any], share: float) -> tuple[bool, str]:
    whole = one["ranks"][0]["bytes"]
    held = [rank["bytes"] for rank in other["ranks"]]
    detail = f"{[round(size / 2**20) for size in held]} MiB per rank, {whole / 2**20:.0f} on one"
    # Norms and biases are on both ranks: a thousandth of the tower.
    return all(abs(size / whole - share) < 0.01 for size in held), detail


def digests(other: dict[str, Any], log: Path) -> tuple[bool, str]:
    words = log.read_text(errors="replace")
    lines = dict(
        re.findall(r"\[vision-exp\] active pid=(\d+) role=\S*/model.*overlay=(\w+)", words)
    )
    ranks = {(rank["overlay"][:8], rank["plan"][:8]) for rank in other["ranks"]}
    logged = set(lines.values())
    detail = f"ranks hold {sorted(ranks)}, {len(lines)} processes logged {sorted(logged)}"
    return len(ranks) == 1 and len(lines) == 2 and logged == {next(iter(ranks))[0]}, detail


if __name__ == "__main__":
    verbs = {"run": run, "compare": compare}
    print(json.dumps({"cards": torch.cuda.device_count()}), flush=True)
    sys.exit(verbs[sys.argv[1]](*sys.argv[2:]))
