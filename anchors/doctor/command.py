"""`hotfix.py doctor`: everything a person needs to see, in one screen."""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
from collections.abc import Mapping

from anchors import report
from anchors.digests import read_file
from anchors.doctor import drafting, environment, log, machine, manifest, tower_memory, verdict
from anchors.engine import caches
from anchors.engine.assess import DONE_STATES, answering, as_report, assess
from anchors.engine.overlay import package
from anchors.engine.target import Target
from anchors.errors import DONE, NO, USAGE, HotfixError
from anchors.report import PREFIX, Report

_B12X = "VLLM_USE_B12X_MHC"
_EPS = "VISION_EXP_RMS_NORM_EPS"
_ROCM = "a build for AMD GPUs: not run on AMD hardware; what is known, docs/machines.md"


def run(arguments: argparse.Namespace, target: Target, shipped: Mapping[str, bytes]) -> Report:
    """The screen, or with --manifest, --against and --log their answers."""
    with answering():
        found = assess(target, package(shipped), arguments.overlay_root)
    result = as_report(found, "doctor")
    here = manifest.of(result)
    if arguments.manifest:
        result["exit"] = DONE if result["state"] in DONE_STATES else NO
        result["manifest"] = here
        result["text"] = json.dumps(here, indent=1, sort_keys=True) + "\n"
        return result
    gpus, installed = environment.gpus(), machine.read(target.root)
    rule = drafting.legal_k(_bytes(target, drafting.FILE))
    facts = _facts(target, result, gpus, installed, rule, found.plan.platform)
    hint = result["error"]["hint"] if result["error"] else ""
    findings = [
        *verdict.of_tree(result["state"], result["detail"], hint or "python3 hotfix.py apply"),
        *verdict.of_settings(dict(os.environ)),
        *verdict.of_draft_lengths(tuple(rule.legal), rule.reason),
    ]
    native = result["state"] == "superseded"
    for gpu in gpus:
        findings += machine.findings(gpu.capability, installed, native=native)
    if arguments.against:
        different = manifest.differences(here, manifest.load(arguments.against))
        facts.append(("other node", "; ".join(different) or f"the same as {arguments.against}"))
        words = f"this node differs from {arguments.against}: {'; '.join(different)}"
        step = "bash run.sh on both nodes"
        findings += [verdict.Finding(verdict.BROKEN, words, step)] if different else []
    if arguments.log:
        agreement = log.read_all([(path, _text(path)) for path in arguments.log])
        facts += _log_facts(agreement)
        findings += verdict.of_logs(agreement, result["plan"] or "")
    return _answered(result, verdict.judge(_good(result), findings), facts)


def run_log(arguments: argparse.Namespace) -> Report:
    """`doctor --log` where no vLLM is: what the logs alone say."""
    agreement = log.read_all([(path, _text(path)) for path in arguments.log])
    result = report.blank()
    result["verb"] = "doctor"
    facts = [("vLLM", "none in this Python: judged by the log alone"), *_log_facts(agreement)]
    good = f"{len(agreement.processes)} processes agree"
    return _answered(result, verdict.judge(good, verdict.of_logs(agreement, None)), facts)


def _answered(result: Report, found: verdict.Verdict, facts: list[tuple[str, str]]) -> Report:
    result["verdict"] = {"word": found.word, "reason": found.reason}
    result["exit"], result["next"] = found.exit_code, found.next
    result["doctor"] = [{"fact": name, "value": value} for name, value in facts]
    result["text"] = f"{PREFIX} {found.word}: {found.reason}\n{_screen(result, facts)}"
    return result


def _good(result: Report) -> str:
    if result["state"] == "superseded":
        return "this vLLM serves the model natively and needs no hotfix"
    return f"image input is in place (plan {(result['plan'] or '')[:12]})"


def _log_facts(agreement: log.Agreement) -> list[tuple[str, str]]:
    facts = [("log", _agreement_text(agreement))]
    return facts + [("log", each) for each in (*agreement.differences, *agreement.troubles)]


def _facts(
    target: Target,
    result: Report,
    gpus: tuple[environment.Gpu, ...],
    here: machine.Installed,
    rule: drafting.Rule,
    platform: str,
) -> list[tuple[str, str]]:
    facts = [
        ("interpreter", f"{sys.executable} ({sys.version.split()[0]})"),
        ("vLLM", f"{target.version or 'unknown version'} at {target.root}"),
        ("installed", environment.installed_by(target.root)),
        ("caches", _caches(result["state"])),
        ("draft tokens", _draft(rule)),
        ("rms_norm_eps", _eps(target)),
    ]
    facts += [("machine", _ROCM)] if platform == "rocm" else _machine(result, gpus, here)
    sizes = ", ".join(f"{tower_memory.gibibytes(n):.2f} at {n}" for n in (1, 2, 4, 8))
    facts.append(("tower", f"GiB per rank by tensor-parallel size: {sizes} (data mode: as at 1)"))
    facts.append(("with images", tower_memory.BESIDE))
    return facts


def _machine(
    result: Report, gpus: tuple[environment.Gpu, ...], here: machine.Installed
) -> list[tuple[str, str]]:
    if not gpus:
        return [("machine", "no GPU seen: what runs on which, docs/machines.md")]
    facts = []
    native = result["state"] == "superseded"
    for gpu in gpus:
        facts.append(("machine", f"{gpu.name}, SM{gpu.capability.replace('.', '')}"))
        table = () if native else machine.rows(gpu.capability, here)
        facts += [(row.part, f"{row.what} ({row.why})") for row in table]
    return facts


def _caches(state: str) -> str:
    """Model-inspection entries are all that can outlive an apply: written before it, they lie."""
    entries = [
        entry
        for root in caches.cache_roots()
        for entry in glob.glob(
            os.path.join(glob.escape(root), "modelinfos", "vllm-models-deepseek_v4-*.json")
        )
    ]
    if not entries:
        return "no model-inspection entry of DeepSeek-V4"
    if state in ("applied", "applied-unrecorded"):
        return f"written since apply, harmless: {', '.join(entries)}"
    return f"cleared by apply: {', '.join(entries)}"


def _draft(rule: drafting.Rule) -> str:
    if rule.reason:
        return f"unknown: {rule.reason}"
    legal = ", ".join(map(str, rule.legal)) or "none"
    lines = ", ".join(map(str, rule.lines))
    return f"DSpark takes k = {legal} (up to {drafting.MOST}; {drafting.FILE}:{lines})"


def _eps(target: Target) -> str:
    kept = os.environ.get(_EPS) == "keep"
    fused = os.environ.get(_B12X, "0") not in ("", "0")
    known = any(
        _B12X.encode() in (_bytes(target, path) or b"")
        for path in ("envs.py", "models/deepseek_v4/nvidia/model.py")
    )
    takes = environment.mhc_eps(os.path.dirname(target.root))
    if fused and "1e-20" in takes.split(", "):
        why = f"need not be forced: {_B12X}=1, and the installed b12x takes {takes}"
    elif fused:
        why = f"must be forced: {_B12X}=1, and that kernel takes {takes or '1e-6'} only"
    elif known:
        why = f"need not be forced unless {_B12X}=1, whose kernel takes 1e-6 only"
    else:
        why = "need not be forced: this vLLM has no kernel that demands 1e-6"
    now = f"kept as in the checkpoint ({_EPS}=keep)" if kept else "forced to 1e-6 by default"
    return f"{now}; {why}"


def _bytes(target: Target, path: str) -> bytes | None:
    try:
        return read_file(os.path.join(target.root, path))
    except OSError:
        return None


def _text(path: str) -> str:
    if path == "-":
        return sys.stdin.read()
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        raise HotfixError(
            "no-log",
            f"{path} cannot be read: {error.strerror}. Nothing was changed.",
            exit_code=USAGE,
            hint="vllm serve ... 2>&1 | tee server.log; then "
            "python3 hotfix.py doctor --log server.log",
        ) from error


def _agreement_text(agreement: log.Agreement) -> str:
    if not agreement.processes:
        return "no evidence line: no process of this server built a vision model or processor"
    verdict = "agree" if not agreement.differences else "DO NOT agree"
    count = len(agreement.processes)
    return f"{count} evidence lines {verdict}: {', '.join(agreement.processes)}"


def _screen(result: Report, facts: list[tuple[str, str]]) -> str:
    overlay = result["overlay"]
    detail = f": {result['detail']}" if result["detail"] else ""
    lines = [f"{PREFIX} {result['state']}{detail}"] if result["state"] else []
    for file in result["files"]:
        by_state: dict[str, list[str]] = {}
        for anchor in file["anchors"]:
            by_state.setdefault(anchor["state"], []).append(anchor["id"])
        for state, ids in by_state.items():
            lines.append(f"  {', '.join(ids):<36} {state:<14} {file['path']}")
    if overlay:
        lines.append(
            f"  {'overlay':<36} {overlay['state']:<14} {overlay['digest'][:12]} in "
            f"{overlay['root']}"
        )
    lines += [f"  {name:<15} {value}" for name, value in facts]
    lines += [f"  {'note':<15} {note}" for note in result["notes"]]
    return "\n".join(lines) + "\n"
