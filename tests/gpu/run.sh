#!/usr/bin/env bash
# The GPU checks, from a bare machine with Python 3.12, torch and transformers but no package index.
#
#   PIECES=DIR WORK=DIR OUT=DIR tests/gpu/run.sh STAGE...
#
# PIECES holds piece.* (a gzipped tar of vLLM and what it needs, cut up), the wheels of libcst and
# Pillow, and vision.py of a vLLM with native vision, for the comparison of towers.
# Stages, in this order, or `all`:
#   setup     unpack, patch a hard-link copy with hotfix.py, write the checkpoints
#   patch     patch again, after a change of the overlay (part of setup)
#   warm      compile kernels in parallel
#   first     text bits on stock and patched trees, hidden states against float32, stock's failure
#   second    caches, chunks, company, preemption; visibility; memory; DSpark; rms_norm_eps
#   kernels   the overlay's kernels alone: routing, SM100's second attention pass
#   server    vllm serve, the openai client, the validator
#   two       on a machine with two GPUs only, not part of all: tensor parallelism
#   second2   on two GPUs, not part of all: text bits and kernels, visibility, drafting, two, server
#             and what prefill with visibility costs, in three waves that end before DEADLINE
#   figures   tower and serving times, nothing else running
#   table     all rows; exit 1 if a check failed or is missing
#   cache     pack the compiled kernels into OUT/cache.tgz, for PIECES of a later machine
# Stages are called by name, in the loop at the end, and a GPU is chosen for one subshell each:
# shellcheck disable=SC2317,SC2329,SC2030,SC2031
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
PIECES=${PIECES:?folder with the pieces}
WORK=${WORK:-${TMPDIR:-/tmp}/vision-exp-gpu}
OUT=${OUT:?folder for results}
rows=$WORK/rows
logs=$WORK/logs
mkdir -p "$WORK" "$rows" "$logs" "$OUT"
site=$WORK/site stock=$WORK/stock patched=$WORK/patched home=$WORK/home
vision=$WORK/vision text=$WORK/text
# Seconds after the start at which the last job of `two` and `second2` is stopped.
DEADLINE=${DEADLINE:-3600}

export PATH=/usr/local/cuda/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=
export HOME=$home TRITON_CACHE_DIR=$home/triton TILELANG_CACHE_DIR=$home/tilelang
export DG_JIT_CACHE_DIR=$home/dg FLASHINFER_WORKSPACE_BASE=$home
export VLLM_DEEP_GEMM_WARMUP=skip VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
export VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=INFO
mkdir -p "$home"

# in_tree TREE COMMAND...: each tree has its own vLLM cache, so neither can serve the other's answers.
# The checks take vision_exp from where the patched vLLM takes it, not from the repository.
in_tree() {
    local tree=$1 overlay=
    shift
    [ "$tree" = "$stock" ] || overlay=:$WORK/overlay
    PYTHONPATH=$tree:$site:$site/nvidia_cutlass_dsl/dsl_packages$overlay \
        VLLM_CACHE_ROOT=$home/vllm-$(basename "$tree") "$@"
}

# job NAME SECONDS TREE COMMAND...: in the background, log kept, its end reported.
job() {
    local name=$1 limit=$2 tree=$3
    shift 3
    [ $((DEADLINE - SECONDS)) -ge "$limit" ] || limit=$((DEADLINE - SECONDS))
    [ "$limit" -gt 5 ] || { echo "[$name] not run, no time left" && return; }
    (
        begun=$SECONDS
        in_tree "$tree" timeout -k 5 "$limit" "$@" >"$logs/$name.log" 2>&1
        code=$?
        echo "[$name] exit $code after $((SECONDS - begun)) s"
        grep -h '^\[check\]' "$logs/$name.log"
        [ "$code" = 0 ] || tail -n 25 "$logs/$name.log"
    ) &
}

setup() {
    set -e
    mkdir -p "$site" "$stock"
    cat "$PIECES"/piece.* | tar xz -C "$site"
    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" \
        "$PIECES"/*.whl
    [ ! -f "$PIECES/cache.tgz" ] || tar xzf "$PIECES/cache.tgz" -C "$home"
    mv "$site/vllm" "$stock/vllm"
    cp -al "$stock" "$patched"
    patch
    python3 "$here/tiny_checkpoint.py" "$vision" --vision-layers 32 &
    local writing=$!
    python3 "$here/tiny_checkpoint.py" "$text" --text-only
    wait "$writing"
    du -sh "$vision" "$text"
    set +e
}

patch() {
    PYTHONPATH=$site VLLM_CACHE_ROOT=$home/vllm-patched python3 "$repo/hotfix.py" \
        --root "$patched/vllm" --overlay-root "$WORK/overlay" apply
}

warm() {
    in_tree "$stock" timeout 400 python3 "$here/warm_kernels.py" --jobs 16
}

first() {
    job reference 540 "$patched" python3 "$here/checks_reference.py" "$vision" \
        "$rows/reference.json" "$WORK/eager.json"
    text_dumps 500
    job stock-fails 400 "$stock" python3 "$here/checks_server.py" stock "$vision" \
        "$rows/stock_fails.json" "$logs/stock-serve.log"
    wait
    text_compare
}

# text_dumps SECONDS: five engines, three of them stock vLLM, to learn what it repeats itself.
text_dumps() {
    local name
    for name in stock again third; do
        job "text-$name" "$1" "$stock" python3 "$here/dump_text.py" "$text" "$WORK/$name.pt"
    done
    job text-patched "$1" "$patched" python3 "$here/dump_text.py" "$text" "$WORK/patched.pt"
    job text-vision "$1" "$patched" python3 "$here/dump_text.py" "$vision" "$WORK/vision.pt"
}

text_compare() {
    in_tree "$stock" python3 "$here/compare_text.py" "$rows/text.json" "$WORK/patched.pt" \
        "$WORK/vision.pt" "$WORK"/{stock,again,third}.pt
}

# draft_jobs SECONDS: with drafting and without; draft_compare judges.
draft_jobs() {
    job draft-plain "$1" "$patched" python3 "$here/checks_draft.py" plain "$vision" \
        "$WORK/draft-plain.json"
    job draft "$1" "$patched" python3 "$here/checks_draft.py" draft "$vision" \
        "$WORK/draft.json" "$rows/draft.json"
}

draft_compare() {
    in_tree "$patched" python3 "$here/checks_draft.py" compare "$WORK/draft-plain.json" \
        "$WORK/draft.json" "$rows/draft.json"
}

second() {
    job reuse 580 "$patched" python3 "$here/checks_reuse.py" "$vision" "$rows/reuse.json" \
        "$WORK/eager.json"
    job visibility 500 "$patched" python3 "$here/visibility_check.py" "$vision" \
        "$rows/visibility.json"
    job memory 500 "$patched" python3 "$here/checks_memory.py" "$vision" "$rows/memory.json"
    draft_jobs 500
    job eps-forced 500 "$patched" python3 "$here/checks_eps.py" dump "$vision" "$WORK/forced.pt"
    VISION_EXP_RMS_NORM_EPS=keep job eps-kept 500 "$patched" \
        python3 "$here/checks_eps.py" dump "$vision" "$WORK/kept.pt"
    wait
    draft_compare
    in_tree "$patched" python3 "$here/checks_eps.py" compare "$rows/eps.json" \
        "$WORK/forced.pt" "$WORK/kept.pt"
}

kernels() {
    job sm100 300 "$patched" python3 "$here/visibility_sm100_pass.py" "$rows/sm100.json"
    job routing 300 "$patched" python3 "$here/routing_check.py" --batches 2000 \
        --out "$OUT/routing.json"
    wait
    tail -n 25 "$logs/routing.log"
}

server() {
    job server 560 "$patched" python3 "$here/checks_server.py" patched "$vision" \
        "$rows/server.json" "$logs/serve.log"
    wait
}

# two_jobs SECONDS MODE...: the same requests on one GPU, or on both in the given ways.
two_jobs() {
    local limit=$1 mode
    shift
    for mode in "$@"; do
        job "two-$mode" "$limit" "$patched" python3 "$here/checks_two.py" run "$mode" "$vision" \
            "$WORK/two-$mode.pt"
    done
}

two_soak() {
    CHECKS_PORT=8130 job two-soak "$1" "$patched" python3 "$here/checks_two.py" soak "$vision" \
        "$rows/two_soak.json" "$logs/two-soak-serve.log"
}

# A second tree whose overlay is another one, for the second of two nodes.
two_differ() {
    local tool=$WORK/other-tool
    mkdir -p "$tool" "$WORK/other"
    cp -r "$repo"/{hotfix.py,anchors,vision_exp} "$tool/"
    echo "# another version" >>"$tool/vision_exp/layout.py"
    cp -al "$stock/." "$WORK/other"
    PYTHONPATH=$site VLLM_CACHE_ROOT=$home/vllm-other python3 "$tool/hotfix.py" \
        --root "$WORK/other/vllm" --overlay-root "$WORK/other-overlay" apply >"$logs/other.log" 2>&1
    job two-differ "$1" "$patched" python3 "$here/checks_two.py" differ "$vision" \
        "$rows/two_differ.json" "$logs" "$WORK/other" "$WORK/other-overlay"
}

two_compare() {
    in_tree "$patched" python3 "$here/checks_two.py" compare "$rows/two.json" "$WORK" "$logs"
}

two() {
    two_jobs 200 one sharded data drafting
    wait
    two_soak 250
    two_differ 120
    wait
    two_compare
    python3 "$here/table.py" "$rows" two two_soak two_differ
}

# prefill LABEL TREE MODEL: figures of one tree, nothing else on its GPU.
prefill() {
    in_tree "$2" timeout -k 5 $((DEADLINE - SECONDS)) python3 "$repo/bench/visibility.py" measure "$3" \
        "$OUT/visibility-$1.json" >"$logs/prefill-$1.log" 2>&1 || tail -n 15 "$logs/prefill-$1.log"
}

results() {
    tar cz -C "$WORK" rows logs >"$OUT/rows-logs.tgz"
}

second2() {
    # Both GPUs, from the start to the end of the second wave: shapes of two ranks compile first.
    two_jobs 225 sharded data drafting
    two_soak 235
    (
        export CUDA_VISIBLE_DEVICES=1
        job routing 120 "$patched" python3 "$here/routing_check.py" --batches 2000 \
            --out "$OUT/routing.json"
        job visibility 140 "$patched" python3 "$here/visibility_check.py" "$vision" \
            "$rows/visibility.json"
        draft_jobs 140
        two_jobs 140 one
        wait
        draft_compare
        tail -n 12 "$logs/routing.log"
    ) &
    local first=($!)
    (
        export CUDA_VISIBLE_DEVICES=0
        text_dumps 140
        wait
        text_compare
    ) &
    first+=($!)
    wait "${first[@]}"
    results
    CUDA_VISIBLE_DEVICES=0 job server 130 "$patched" python3 "$here/checks_server.py" patched \
        "$vision" "$rows/server.json" "$logs/serve.log"
    two_differ 115
    wait
    two_compare
    results
    (
        export CUDA_VISIBLE_DEVICES=0
        [ $((DEADLINE - SECONDS)) -lt 60 ] || prefill stock "$stock" "$text"
        [ $((DEADLINE - SECONDS)) -lt 30 ] || prefill patched "$patched" "$text"
    ) &
    (
        export CUDA_VISIBLE_DEVICES=1
        [ $((DEADLINE - SECONDS)) -lt 30 ] || prefill vision "$patched" "$vision"
    ) &
    wait
    in_tree "$patched" python3 "$repo/bench/visibility.py" compare \
        "$OUT"/visibility-{stock,patched,vision}.json
    results
    python3 "$here/table.py" "$rows" text visibility draft two two_soak two_differ server
}

figures() {
    in_tree "$patched" timeout 200 python3 "$repo/bench/gpu_tower.py" \
        --native "$PIECES/vision.py" --json "$OUT/tower.json"
    local name
    for name in stock:"$stock":"$text" patched:"$patched":"$text" vision:"$patched":"$vision"; do
        IFS=: read -r label tree model <<<"$name"
        in_tree "$tree" timeout 200 python3 "$repo/bench/gpu_serving.py" measure "$model" \
            "$OUT/serving-$label.json" >"$logs/serving-$label.log" 2>&1 ||
            tail -n 20 "$logs/serving-$label.log"
    done
    in_tree "$patched" python3 "$repo/bench/gpu_serving.py" compare \
        "$OUT"/serving-{stock,patched,vision}.json
}

table() {
    results
    python3 "$here/table.py" "$rows" stock_fails text reference reuse visibility memory eps draft \
        sm100 server
}

cache() {
    tar czf "$OUT/cache.tgz" -C "$home" . && ls -l "$OUT/cache.tgz"
}

stages=("$@")
[ "${1:-}" != all ] || stages=(setup warm first second kernels server figures cache table)
code=0
for stage in "${stages[@]}"; do
    case $stage in
    setup | patch | warm | first | second | kernels | server | two | second2 | figures | table | cache) ;;
    *) echo "unknown stage $stage" >&2 && exit 2 ;;
    esac
    begun=$SECONDS
    "$stage"
    code=$?
    echo "== $stage: exit $code, $((SECONDS - begun)) s"
done
exit $code
