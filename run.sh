#!/bin/bash
# vision-exp: image input for DeepSeek-V4-Flash-Vision-Exp in the vLLM of this container's python3.
# No arguments. Exit 0 = applied, already applied, or not needed upstream.
# Any other exit: this vLLM was left as it was (5: see the message). Safe to run again.
#
#   bash run.sh --sandbox DIR [--vllm VERSION]
# needs no vLLM: fetches that release's sources into DIR (default: the newest that has no
# image input), applies, verifies, shows. Interrupted, it goes on when it is run again.
set -euo pipefail

PREFIX="[vision-exp]"
MOD_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONDONTWRITEBYTECODE=1   # this folder may be read-only, and is copied to every node
SCRATCH=""
trap '[ -z "$SCRATCH" ] || rm -rf "$SCRATCH"' EXIT

die() { printf '%s %s Nothing was changed.\nnext: %s\n' "$PREFIX" "$1" "$2" >&2; exit 6; }
usage() {
    printf '%s usage: run.sh [--sandbox DIR [--vllm VERSION]]: %s. Nothing was changed.\n' "$PREFIX" "$1" >&2
    printf 'next: bash %q --help\n' "$MOD_DIR/run.sh" >&2
    exit 2
}
say() { printf '%s %s\n' "$PREFIX" "$1"; }
# What pip means: without a network it says that there is no matching distribution.
pip_cause() {
    case "$1" in
        *onnection*|*onnectTimeout*|*"timed out"*|*"name resolution"*|*nreachable*)
            printf 'no network: the package index of pip cannot be reached' ;;
        *) printf 'pip failed: %s' "$(printf '%s' "$1" | tail -n 1)" ;;
    esac
}

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
        die "LibCST is missing: no wheel for this Python in wheels/, and $(pip_cause "$reason")." \
            "python3 -m pip install libcst, or use the bundle with wheels"
    fi
    export PYTHONPATH="$SCRATCH${PYTHONPATH:+:$PYTHONPATH}"
}

sandbox() {
    local folder version="$2" environment python reason
    again() { printf 'bash %q --sandbox %q --vllm %s' "$MOD_DIR/run.sh" "$folder" "$version"; }
    reason="$(mkdir -p -- "$1" 2>&1)" || die "$1 cannot be made: ${reason##*: }." "name another folder"
    folder="$(cd -- "$1" && pwd)"
    [ -w "$folder" ] || die "$folder cannot be written." "name another folder"
    trap 'printf "%s interrupted; nothing outside %s was written.\nnext: %s\n" "$PREFIX" "$folder" "$(again)" >&2; exit 130' INT TERM HUP
    say "sandbox of vLLM $version in $folder, which needs about 60 MB"
    environment="$folder/vision-exp-venv"
    python="$environment/bin/python3"
    # Made by this alone, and only the last step says that it is complete.
    if ! [ -e "$environment/complete" ] || ! "$python" -c 'import libcst, remotezip' >/dev/null 2>&1; then
        say "1/4 making an environment with LibCST"
        rm -rf -- "$environment"
        reason="$(python3 -m venv "$environment" 2>&1)" \
            || die "no virtual environment can be made: $(printf '%s' "$reason" | tail -n 1)." \
                "install the venv module of this Python (Debian: apt-get install python3-venv)"
        reason="$("$python" -m pip install --quiet --disable-pip-version-check --no-input \
                --timeout 20 --retries 1 libcst remotezip 2>&1)" \
            || die "LibCST cannot be installed: $(pip_cause "$reason")." "see to that, then: $(again)"
        : >"$environment/complete"
    fi
    say "2/4 fetching its sources"
    PYTHONPATH="$MOD_DIR" "$python" -m anchors.releases.sandbox "$version" "$folder/vllm-$version"
    # Its own home: the caches that are cleared are those of the sandbox.
    local words=("$python" "$MOD_DIR/hotfix.py" --root "$folder/vllm-$version/vllm" --overlay-root "$folder/overlay")
    hotfix() { HOME="$folder" VLLM_CACHE_ROOT="$folder/cache" "${words[@]}" "$@"; }
    say "3/4 applying"
    hotfix --quiet apply
    say "4/4 verifying"
    hotfix --quiet verify
    hotfix status
    say "to take it away: cd $(printf %q "$folder") && rm -rf vision-exp-venv vllm-$version overlay cache"
    printf 'next: %s   (the lines that were added)\n' "$(printf '%q ' "${words[@]}")diff --reverse"
}

folder="" version=""
while [ $# -gt 0 ]; do
    case "$1" in
        -h|--help) sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --sandbox) [ -n "${2:-}" ] || usage "--sandbox needs a folder"; folder="$2"; shift 2 ;;
        --vllm) [ -n "${2:-}" ] || usage "--vllm needs a version"; version="$2"; shift 2 ;;
        *) usage "unknown argument $1" ;;
    esac
done
[ -n "$folder" ] || [ -z "$version" ] || usage "--vllm goes with --sandbox"

find_python
if [ -n "$folder" ]; then
    version="$(PYTHONPATH="$MOD_DIR" python3 -m anchors.releases.known "${version:-latest}")"
    sandbox "$folder" "$version"
else
    provide_libcst
    python3 "$MOD_DIR/hotfix.py" apply   # not exec: the trap must run; set -e passes the code on
fi
