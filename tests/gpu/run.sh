#!/usr/bin/env bash
# The GPU checks, from a bare machine with Python 3.12, torch and transformers but no package index.
#
#   PIECES=DIR WORK=DIR OUT=DIR tests/gpu/run.sh STAGE...
#
# PIECES holds piece.* (a gzipped tar of vLLM and what it needs, cut up), the wheels of libcst and
# Pillow, cache*.tgz of an earlier machine if there are any, and vision.py of a vLLM with native
# vision, for the comparison of towers.
# A vLLM that needs another torch than the machine's brings it: instead of piece.* then a.* and b.*
# (two zstd streams of tar, cut up), links.txt (the machine's own CUDA libraries to link to, a line
# each) and a wheel of zstandard.
# Another release on the same machine: another PIECES, WORK, OUT and CHECKS_PORT, and CHECKPOINTS=
# the first one's WORK, which has the checkpoints.
# Exit code 1 if a job of any stage failed, was cut off or not run; each leaves rows/JOB.failed until
# it is run again, and the table lists those too.
# For `beside`: c.*, a vLLM with native vision and the packages that it needs in other versions.
# Stages, in this order, or `all` alone:
#   setup     unpack, patch a hard-link copy with hotfix.py, write the checkpoints
#   patch     patch again, after a change of the overlay (part of setup)
#   warm      compile kernels in parallel
#   first     text bits on stock and patched trees, hidden states against float32, stock's failure
#   second    caches, chunks, co-batching, preemption; visibility; where repeats part; memory; DSpark;
#             rms_norm_eps
#   kernels   the overlay's kernels alone: routing, SM100's second attention pass
#   server    vllm serve, the openai client, the validator
#   figures   tower and serving times, nothing else running
#   table     all rows; exit 1 if a check failed or is missing
#   cache     pack the kernels compiled since setup into OUT/cache.tgz
# Not part of `all`:
#   release   after setup and warm: what another release has to show, server and table included
#   serving   the serving times alone (part of figures)
#   tower     the tower's times alone (part of figures)
#   attention the tower's times with every kind of attention that the card has
#   images    the first token of an image request and the image prefill alone (part of serving)
#   vision    hidden states, server, tower and images: what a change of these needs
#   sees      fit a checkpoint that sees, and what it answers; LIMIT= seconds for the answers
#   sees_served   that checkpoint by ours and by a native vLLM (c.*), over HTTP, many clients
#   two       two GPUs: tensor parallelism
#   two_ranks two GPUs: two without the three minutes of requests
#   two_tower two GPUs: both modes of the tower in milliseconds
#   differ    two GPUs: two nodes with different overlays alone (part of two)
#   session   two GPUs: two, DSpark, text bits, caches, memory, server, and then serving times
#   sees_fit  its fit alone; warm_native   a native vLLM's kernels alone
#   beside_warm   ours and a native vLLM started once, every row asked once: compiles kernels
#   beside        ours beside native: requests, prompts, preparation; goes on where it was cut off
#   beside_start  both servers started at once, five times
# Stages are called by name, in the loop at the end, and a GPU is chosen for one subshell each:
# So are variables that only the sourced files use.
# shellcheck disable=SC2317,SC2329,SC2030,SC2031,SC2034
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)

known=" setup patch warm first second kernels server figures table cache release serving tower images "
known+="attention vision sees_fit sees sees_served two two_ranks two_tower differ session "
known+="warm_native beside_warm beside beside_start "
refuse() {
    echo "$1; nothing was run" >&2
    echo "next: PIECES=DIR WORK=DIR OUT=DIR tests/gpu/run.sh STAGE...   (all, or some of:$known)" >&2
    exit 2
}
stages=("$@")
[ $# -gt 0 ] || refuse "no stage named"
[ "$*" != all ] || stages=(setup warm first second kernels server figures cache table)
for stage in "${stages[@]}"; do
    [ "$stage" != all ] || refuse "\`all\` stands alone"
    [[ $known == *" $stage "* ]] || refuse "unknown stage $stage"
done
[ -n "${PIECES:-}" ] && [ -n "${OUT:-}" ] || refuse "PIECES and OUT have to be set"
WORK=${WORK:-${TMPDIR:-/tmp}/vision-exp-gpu}
rows=$WORK/rows
logs=$WORK/logs
mkdir -p "$WORK" "$rows" "$logs" "$OUT" || refuse "these folders cannot be made"
site=$WORK/site stock=$WORK/stock patched=$WORK/patched home=$WORK/home
native=$WORK/native
vision=${CHECKPOINTS:-$WORK}/vision text=${CHECKPOINTS:-$WORK}/text
# SERVING_SECONDS: how long the serving times are taken, without the start of the engines.
# Seconds after the start at which the last job is stopped.
DEADLINE=${DEADLINE:-3600}

# WORK/python is there only where the pieces bring their own torch.
machine_python=$(command -v python3)
export PATH=$WORK/python/bin:/usr/local/cuda/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=
export HOME=$home TRITON_CACHE_DIR=$home/triton TILELANG_CACHE_DIR=$home/tilelang
export DG_JIT_CACHE_DIR=$home/dg FLASHINFER_WORKSPACE_BASE=$home
export VLLM_DEEP_GEMM_WARMUP=skip VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
export VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=INFO
mkdir -p "$home"

# shellcheck source=/dev/null
source "$here/jobs.sh"

warm() {
    job warm 560 "$stock" nice -n 10 python3 "$here/jobs/warm_kernels.py" --jobs 14
    job warm-patched 560 "$patched" nice -n 10 python3 "$here/jobs/warm_kernels.py" --jobs 6 \
        --only fp8,einsum
    wait
    grep -h '^\[warm\]' "$logs"/warm*.log
}

reference_job() {
    job reference "$1" "$patched" python3 "$here/jobs/checks_reference.py" "$vision" \
        "$rows/reference.json"
}

first() {
    reference_job 540
    text_dumps 500
    stock_fails 400
    wait
    text_compare
}

stock_fails() {
    job stock-fails "$1" "$stock" python3 "$here/jobs/checks_server.py" stock "$vision" \
        "$rows/stock_fails.json" "$logs/stock-serve.log"
}

# text_dumps SECONDS: five engines, three of them stock vLLM, to learn what it repeats itself.
text_dumps() {
    local name
    rm -f "$rows/text.json" "$WORK"/{stock,again,third,patched,vision}.pt
    for name in stock again third; do
        job "text-$name" "$1" "$stock" python3 "$here/jobs/dump_text.py" "$text" "$WORK/$name.pt"
    done
    job text-patched "$1" "$patched" python3 "$here/jobs/dump_text.py" "$text" "$WORK/patched.pt"
    job text-vision "$1" "$patched" python3 "$here/jobs/dump_text.py" "$vision" "$WORK/vision.pt"
}

text_compare() {
    compare compare-text "$stock" python3 "$here/jobs/compare_text.py" "$rows/text.json" "$WORK/patched.pt" \
        "$WORK/vision.pt" "$WORK"/{stock,again,third}.pt
}

# draft_jobs SECONDS: with drafting and without; draft_compare compares.
draft_jobs() {
    rm -f "$WORK"/draft{,-plain}.json
    job draft-plain "$1" "$patched" python3 "$here/jobs/checks_draft.py" plain "$vision" \
        "$WORK/draft-plain.json"
    job draft "$1" "$patched" python3 "$here/jobs/checks_draft.py" draft "$vision" \
        "$WORK/draft.json" "$rows/draft.json"
}

draft_compare() {
    compare compare-draft "$patched" python3 "$here/jobs/checks_draft.py" compare "$WORK/draft-plain.json" \
        "$WORK/draft.json" "$rows/draft.json"
}

visibility_job() {
    job visibility "$1" "$patched" python3 "$here/jobs/checks_visibility.py" "$vision" \
        "$rows/visibility.json"
}

noise_job() {
    job noise "$1" "$patched" python3 "$here/jobs/checks_noise.py" "$vision" "$rows/noise.json"
}

second() {
    rm -f "$rows"/{eps,graphs}.json "$WORK"/{forced,kept}.pt "$WORK/graphs.json"
    job reuse 580 "$patched" python3 "$here/jobs/checks_reuse.py" "$vision" "$rows/reuse.json" \
        "$WORK/graphs.json"
    visibility_job 500
    noise_job 500
    job memory 500 "$patched" python3 "$here/jobs/checks_memory.py" "$vision" "$rows/memory.json"
    draft_jobs 500
    job eps-forced 500 "$patched" python3 "$here/jobs/checks_eps.py" dump "$vision" "$WORK/forced.pt"
    VISION_EXP_RMS_NORM_EPS=keep job eps-kept 500 "$patched" \
        python3 "$here/jobs/checks_eps.py" dump "$vision" "$WORK/kept.pt"
    wait
    draft_compare
    compare compare-graphs "$patched" python3 "$here/jobs/checks_graphs.py" "$WORK/draft-plain.json" \
        "$WORK/graphs.json" "$rows/graphs.json"
    compare compare-eps "$patched" python3 "$here/jobs/checks_eps.py" compare "$rows/eps.json" \
        "$WORK/forced.pt" "$WORK/kept.pt"
}

kernels() {
    job sm100 300 "$patched" python3 "$here/jobs/checks_sm100.py" "$rows/sm100.json"
    job routing 300 "$patched" python3 "$here/jobs/checks_routing.py" --batches 2000 \
        --out "$OUT/routing.json"
    wait
    tail -n 25 "$logs/routing.log"
}

# server_job SECONDS: its own vllm serve, on CHECKS_PORT.
server_job() {
    job server "$1" "$patched" python3 "$here/jobs/checks_server.py" patched "$vision" \
        "$rows/server.json" "$logs/serve.log"
}

server() {
    server_job 560
    wait
}

# All on one GPU but for the text dumps where TEXT_GPU names another.
release() {
    stock_fails 200
    reference_job 300
    visibility_job 300
    (
        export CUDA_VISIBLE_DEVICES=${TEXT_GPU:-${CUDA_VISIBLE_DEVICES:-0}}
        text_dumps 300
        wait
        text_compare
    )
    wait
    results
    server_job 260
    draft_jobs 260
    wait
    draft_compare
    results
    rows_of stock_fails text reference visibility server draft
}

# What a change of the tower or of an image's preparation can touch.
vision() {
    reference_job 300
    server_job 300
    wait
    results
    tower
    images
    results
    rows_of reference server tower images
}

table() {
    results
    rows_of stock_fails text reference reuse graphs visibility noise memory eps draft sm100 \
        server tower serving
}

# shellcheck source=/dev/null
source "$here/stages_setup.sh"
# shellcheck source=/dev/null
source "$here/stages_times.sh"
# shellcheck source=/dev/null
source "$here/stages_two.sh"
# shellcheck source=/dev/null
source "$here/stages_beside.sh"
# shellcheck source=/dev/null
source "$here/stages_sees.sh"

# Ends what runs, on the GPU too. SIGINT does not reach what runs in the background by itself.
stopped() {
    trap - INT TERM
    kill -- "-$running"
    exit 130
}

code=0
for stage in "${stages[@]}"; do
    begun=$SECONDS
    # In the background, since a trap waits for what runs in front; with a process group of its own.
    set -m
    "$stage" &
    running=$!
    set +m
    trap stopped INT TERM
    wait "$running"
    result=$?
    trap - INT TERM
    [ "$result" = 0 ] || code=1
    echo "== $stage: exit $result, $((SECONDS - begun)) s"
    # Everything else would only fail for want of it.
    [ "$stage" != setup ] || [ "$result" = 0 ] || break
done
for word in "$rows"/*.failed; do
    [ -e "$word" ] || continue
    code=1
    word=${word##*/}
    echo "== failed: ${word%.failed} ($(cat "$rows/$word"))"
done
exit $code
