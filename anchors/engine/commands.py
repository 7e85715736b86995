"""The verbs that judge a vLLM, as the command line calls them."""

from __future__ import annotations

import argparse

from anchors.engine import diffs, verbs
from anchors.engine.effects import Effects
from anchors.engine.errors import DONE, NO
from anchors.engine.report import Report
from anchors.engine.target import Target


def run(arguments: argparse.Namespace, target: Target) -> Report:
    """Runs `arguments.verb` on `target`. Raises HotfixError for refusals."""
    options = verbs.Options(
        overlay_root=arguments.overlay_root,
        dry_run=getattr(arguments, "dry_run", False),
        strict=getattr(arguments, "strict", False),
    )
    if arguments.verb == "status":
        return verbs.status(target, options)
    if arguments.verb == "verify":
        return verbs.verify(target, options)
    if arguments.verb == "diff":
        return _diff(arguments, target, options)
    if arguments.verb == "revert":
        return verbs.revert(target, options, Effects())
    result = verbs.apply(target, options, Effects())
    if options.dry_run and not arguments.quiet and not arguments.json:
        print(diffs.make(verbs.judge(target, options).plan, reverse=False, context=3).text, end="")
    return result


def _diff(arguments: argparse.Namespace, target: Target, options: verbs.Options) -> Report:
    judged = verbs.judge(target, options)
    if not arguments.reverse:
        verbs.refuse(judged)
    difference = diffs.make(judged.plan, reverse=arguments.reverse, context=arguments.unified)
    result = verbs.as_report(judged, "diff")
    result["diff"] = difference.text
    result["text"] = difference.stat if arguments.stat else difference.text
    result["exit"] = NO if arguments.exit_code and difference.text else DONE
    return result
