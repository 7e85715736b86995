#!/bin/bash
# vision-exp: image input for DeepSeek-V4-Flash-Vision-Exp in the vLLM of this container's python3.
# No arguments. Exit 0 = applied, already applied, or not needed upstream.
# Any other exit: this vLLM was left as it was (5: see the message). Safe to run again.
#
#   bash run.sh --sandbox DIR [--vllm VERSION]
# needs no vLLM: fetches that release's sources into DIR (default: the newest that has no
# image input), applies, verifies, shows.
set -euo pipefail

PREFIX="[vision-exp]"
MOD_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONDONTWRITEBYTECODE=1   # this folder may be read-only, and is copied to every node
SCRATCH=""
trap '[ -z "$SCRATCH" ] || rm -rf "$SCRATCH"' EXIT

die() { printf '%s %s Nothing was changed.\nnext: %s\n' "$PREFIX" "$1" "$2" >&2; exit 6; }
usage() { printf '%s usage: run.sh [--sandbox DIR [--vllm VERSION]]\n' "$PREFIX" >&2; exit 2; }
last_line() { printf '%s' "$1" | tail -n 1; }

find_python() {
    command -v python3 >/dev/null 2>&1 \
        || die "python3 not found in this container." "use an image whose PATH has the Python of its vLLM"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
        || die "python3 is older than 3.10." "use an image with a newer Python"
}

# LibCST for this run only: the serving environment does not get a new package.
provide_libcst() {
    python3 -c 'import libcst' >/dev/null 2>&1 && return
    # A tree that is applied already, or needs nothing, is recognised without it.
    python3 "$MOD_DIR/hotfix.py" -q status >/dev/null 2>&1 && return
    SCRATCH="$(mktemp -d 2>/dev/null)" || die "no temporary folder can be made." "set TMPDIR to a writable folder"
    local reason=""
    if python3 "$MOD_DIR/anchors/bundled.py" "$MOD_DIR/wheels" "$SCRATCH" >/dev/null 2>&1; then
        :
    elif ! reason="$(python3 -m pip install --quiet --disable-pip-version-check --no-input \
            --timeout 20 --retries 1 --target "$SCRATCH" libcst 2>&1)"; then
        die "LibCST is missing: no wheel for this Python in wheels/, and pip failed: $(last_line "$reason")." \
            "python3 -m pip install libcst, or use the bundle with wheels"
    fi
    export PYTHONPATH="$SCRATCH${PYTHONPATH:+:$PYTHONPATH}"
}

sandbox() {
    local folder version="$2" python reason
    mkdir -p "$1" || die "$1 cannot be made." "name another folder"
    folder="$(cd -- "$1" && pwd)"
    python="$folder/venv/bin/python3"
    if ! [ -x "$python" ]; then
        reason="$(python3 -m venv "$folder/venv" 2>&1)" \
            || die "no virtual environment can be made: $(last_line "$reason")." \
                "install the venv module of this Python (Debian: apt-get install python3-venv)"
    fi
    if ! "$python" -c 'import libcst, remotezip' >/dev/null 2>&1; then
        reason="$("$python" -m pip install --quiet --disable-pip-version-check libcst remotezip 2>&1)" \
            || die "LibCST cannot be installed: $(last_line "$reason")." "check the package index of pip"
    fi
    PYTHONPATH="$MOD_DIR" "$python" -m anchors.releases.sandbox "$version" "$folder/vllm-$version"
    # Its own home: the caches that are cleared are those of the sandbox.
    hotfix() {
        HOME="$folder" VLLM_CACHE_ROOT="$folder/cache" "$python" "$MOD_DIR/hotfix.py" \
            --root "$folder/vllm-$version/vllm" --overlay-root "$folder/overlay" "$@"
    }
    hotfix --quiet apply
    hotfix --quiet verify
    hotfix status
}

case "${1:-}" in
    "") find_python
        provide_libcst
        python3 "$MOD_DIR/hotfix.py" apply ;;   # not exec: the trap must run; set -e passes the code on
    --sandbox)
        [ -n "${2:-}" ] || usage
        [ $# -eq 2 ] || { [ $# -eq 4 ] && [ "$3" = --vllm ]; } || usage
        find_python
        version="${4:-$(PYTHONPATH="$MOD_DIR" python3 -m anchors.releases.known)}"
        sandbox "$2" "$version" ;;
    *) usage ;;
esac
