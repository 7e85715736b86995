"""The verbs that judge a vLLM, as the command line calls them."""

from __future__ import annotations

import argparse

from anchors.cli.report import Report
from anchors.engine import prove as check
from anchors.engine.assess import DONE_STATES, Options, answering, as_report, judge, refuse
from anchors.engine.target import Target
from anchors.errors import DONE, NO
from anchors.verbs import diffs, importing
from anchors.verbs.apply import apply, prove
from anchors.verbs.revert import revert
from anchors.writing.effects import Effects


def run(arguments: argparse.Namespace, target: Target) -> Report:
    """Runs `arguments.verb` on `target`. Raises HotfixError for refusals."""
    options = Options(
        overlay_root=arguments.overlay_root,
        dry_run=getattr(arguments, "dry_run", False),
        strict=getattr(arguments, "strict", False),
    )
    if arguments.verb == "apply":
        return _apply(arguments, target, options)
    if arguments.verb == "revert":
        return revert(target, options, Effects())
    if arguments.verb == "diff":
        return _diff(arguments, target, options)
    with answering():
        return {"status": _status, "verify": _verify}[arguments.verb](arguments, target, options)


def _apply(arguments: argparse.Namespace, target: Target, options: Options) -> Report:
    result = apply(target, options, Effects())
    if options.dry_run:
        plan = judge(target, options).plan
        if result["state"] not in DONE_STATES:
            result["summary"] = "would be applied; nothing was written"
        result["diff"] = diffs.make(plan, reverse=False, context=3).text
        if not arguments.json and not arguments.quiet:
            print(result["diff"], end="")
    return result


def _status(arguments: argparse.Namespace, target: Target, options: Options) -> Report:
    judged = judge(target, options)
    prove(judged)  # what apply would refuse is not called pristine
    result = as_report(judged, "status")
    result["exit"] = DONE if result["state"] in DONE_STATES else NO
    return result


def _verify(arguments: argparse.Namespace, target: Target, options: Options) -> Report:
    """Re-derives everything from the bytes and proves it; exit 1 where that does not hold."""
    judged = judge(target, options, trust_receipt=False)
    result = as_report(judged, "verify")
    result["exit"] = DONE if judged.state in DONE_STATES else NO
    if judged.state in ("applied", "applied-unrecorded"):
        check.prove(judged.plan)
        if arguments.imports:
            importing.check(target, judged.plan)
    return result


def _diff(arguments: argparse.Namespace, target: Target, options: Options) -> Report:
    judged = judge(target, options)
    if not arguments.reverse:
        refuse(judged)
    difference = diffs.make(judged.plan, reverse=arguments.reverse, context=arguments.unified)
    result = as_report(judged, "diff")
    result["diff"] = difference.text
    result["text"] = difference.stat if arguments.stat else difference.text
    result["exit"] = NO if arguments.exit_code and difference.text else DONE
    return result
