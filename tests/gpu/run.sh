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
#   figures   tower and serving times, nothing else running
#   table     all rows; exit 1 if a check failed or is missing
#   cache     pack the compiled kernels into OUT/cache.tgz, for PIECES of a later machine
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
    (
        begun=$SECONDS
        in_tree "$tree" timeout "$limit" "$@" >"$logs/$name.log" 2>&1
        code=$?
        echo "[$name] exit $code after $((SECONDS - begun)) s"
        grep -h '^\[check\]' "$logs/$name.log"
        [ $code = 0 ] || tail -n 25 "$logs/$name.log"
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
    wait $writing
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
    job text-stock 500 "$stock" python3 "$here/dump_text.py" "$text" "$WORK/stock.pt"
    job text-patched 500 "$patched" python3 "$here/dump_text.py" "$text" "$WORK/patched.pt"
    job text-vision 500 "$patched" python3 "$here/dump_text.py" "$vision" "$WORK/vision.pt"
    job stock-fails 400 "$stock" python3 "$here/checks_server.py" stock "$vision" \
        "$rows/stock_fails.json" "$logs/stock-serve.log"
    wait
    in_tree "$stock" python3 "$here/compare_text.py" "$rows/text.json" \
        "$WORK/stock.pt" "$WORK/patched.pt" "$WORK/vision.pt"
}

second() {
    job reuse 580 "$patched" python3 "$here/checks_reuse.py" "$vision" "$rows/reuse.json" \
        "$WORK/eager.json"
    job visibility 500 "$patched" python3 "$here/visibility_check.py" "$vision" \
        "$rows/visibility.json"
    job text-again 500 "$stock" python3 "$here/dump_text.py" "$text" "$WORK/again.pt"
    job memory 500 "$patched" python3 "$here/checks_memory.py" "$vision" "$rows/memory.json"
    job draft 500 "$patched" python3 "$here/checks_draft.py" "$vision" "$rows/draft.json" \
        "$WORK/eager.json"
    job eps-forced 500 "$patched" python3 "$here/checks_eps.py" dump "$vision" "$WORK/forced.pt"
    VISION_EXP_RMS_NORM_EPS=keep job eps-kept 500 "$patched" \
        python3 "$here/checks_eps.py" dump "$vision" "$WORK/kept.pt"
    wait
    in_tree "$stock" python3 "$here/compare_text.py" "$rows/control.json" "$WORK/stock.pt" \
        "$WORK/again.pt"
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

two() {
    job two 590 "$patched" python3 "$here/checks_two.py" "$vision" "$rows/two.json" "$logs"
    wait
    python3 "$here/table.py" "$rows" two
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
    tar cz -C "$WORK" rows logs | cat >"$OUT/rows-logs.tgz"
    python3 "$here/table.py" "$rows" stock_fails text control reference reuse visibility memory eps draft \
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
    setup | patch | warm | first | second | kernels | server | two | figures | table | cache) ;;
    *) echo "unknown stage $stage" >&2 && exit 2 ;;
    esac
    begun=$SECONDS
    "$stage"
    code=$?
    echo "== $stage: exit $code, $((SECONDS - begun)) s"
done
exit $code
