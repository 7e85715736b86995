"""Runs the routing and step checks in one vLLM release: routing_child.py RESULT [ONLY]."""

from __future__ import annotations

import sys

import checks
import checks_drafts  # noqa: F401
import checks_rocm  # noqa: F401
import checks_routing  # noqa: F401
import checks_selftest  # noqa: F401
import checks_step  # noqa: F401
import rig_routing

if __name__ == "__main__":
    result, *only = sys.argv[1:]
    results = checks.run(rig_routing.Rig(), *only)
    checks.write(result, checks=results)
    print("\n".join(f"{name}\n{trace}" for name, trace in results.items() if trace))
    sys.exit(any(results.values()))
