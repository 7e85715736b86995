#!/bin/bash
# Sets up what the CPU tests need and runs all of them, from a bare machine with Python 3.10+ and a package index.
# Arguments go to pytest: `bash tests/run.sh tests/anchors -k revert`.
# VISION_EXP_TEST_VENV and VISION_EXP_TEST_CACHE say where the environment and the fetched sources are kept.
set -euo pipefail

REPO="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$REPO"
export VISION_EXP_TEST_CACHE="${VISION_EXP_TEST_CACHE:-$REPO/.cache}"
VENV="${VISION_EXP_TEST_VENV:-$REPO/.venv}"
# Test processes share the cores; more threads in each would only get in the others' way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
unset PYTHONPATH PYTHONHOME VISION_EXP_TEST_CHECKS VISION_EXP_OVERLAY_ROOT VISION_EXP_DISABLE VLLM_PACKAGE_ROOT VLLM_PACKAGE_DIR

python=""
for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
        python="$name"
        break
    fi
done
[ -n "$python" ] || { echo "tests: no Python 3.10 to 3.14 found" >&2; exit 1; }

VISION_EXP_TEST_DOWNLOADS="$(mktemp)"
export VISION_EXP_TEST_DOWNLOADS
trap 'rm -f "$VISION_EXP_TEST_DOWNLOADS"' EXIT
SECONDS=0
echo "tests: environment $VENV and sources in $VISION_EXP_TEST_CACHE need 6.7 GB in all, fetched once"
PYTHONPATH="$REPO" "$python" tests/support/environment.py "$VENV" "$VISION_EXP_TEST_CACHE" </dev/null
# Types are checked on one core while the other waits for the network.
"$VENV/bin/mypy" --no-error-summary </dev/null &
types=$!
PYTHONPATH="$REPO" "$VENV/bin/python" tests/support/sources.py </dev/null
"$VENV/bin/ruff" check --quiet .
"$VENV/bin/ruff" format --check --quiet .
wait "$types"
# Printed apart: how long downloads take is the index's and the network's doing.
downloads=$(awk '{ sum += $1 } END { printf "%d", sum }' "$VISION_EXP_TEST_DOWNLOADS")
set_up=$((SECONDS - downloads))
SECONDS=0
code=0
# Three processes for two cores: some tests wait, for a server that answers late or a process that ends.
"$VENV/bin/python" -m pytest -n 3 --dist loadgroup "$@" </dev/null || code=$?
echo "tests: $downloads s of downloading, $set_up s of set-up and lint, $SECONDS s of tests"
exit "$code"
