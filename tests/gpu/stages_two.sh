# shellcheck shell=bash
# Sourced by run.sh, whose variables these stages use. On a machine with two GPUs: one model over
# both, and a session that also measures.
# shellcheck disable=SC2154,SC2317,SC2329,SC2030,SC2031

# two_jobs SECONDS MODE...: the same requests on one GPU, or on both in the given ways.
two_jobs() {
    local limit=$1 mode
    rm -f "$rows/two.json"
    shift
    for mode in "$@"; do
        job "two-$mode" "$limit" "$patched" python3 "$here/jobs/checks_two.py" run "$mode" "$vision" \
            "$WORK/two-$mode.pt"
    done
}

# two_soak SECONDS: image requests for three minutes, in the background; returns once they begin.
# A dozen engines that start beside it are why its server was late once.
two_soak() {
    local until=$((SECONDS + $1 - 200))
    rm -f "$WORK/soak-ready"
    CHECKS_PORT=8130 job two-soak "$1" "$patched" python3 "$here/jobs/checks_two_serve.py" soak \
        "$vision" "$rows/two_soak.json" "$logs/two-soak-serve.log" "$WORK/soak-ready"
    while [ ! -e "$WORK/soak-ready" ] && [ "$SECONDS" -lt "$until" ] && [ -n "$(jobs -rp)" ]; do
        sleep 1
    done
    echo "[two-soak] $(head -c 200 "$WORK/soak-ready" 2>/dev/null)"
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
    job two-differ "$1" "$patched" python3 "$here/jobs/checks_two_serve.py" differ "$vision" \
        "$rows/two_differ.json" "$logs" "$WORK/other" "$WORK/other-overlay"
}

# The refusal alone.
differ() {
    two_differ 200
    wait
    rows_of two_differ
}

two_compare() {
    compare compare-two "$patched" python3 "$here/jobs/checks_two.py" compare "$rows/two.json" "$WORK" "$logs"
}

two() {
    two_soak 440
    two_jobs 260 one sharded data drafting
    wait
    two_differ 140
    wait
    two_compare
    rows_of two two_soak two_differ
}

# `two` without the three minutes of requests.
two_ranks() {
    two_jobs 260 one sharded data drafting
    wait
    two_differ 140
    wait
    two_compare
    rows_of two two_differ
}

# Both modes of the tower in milliseconds, nothing else running.
two_tower() {
    job two-tower 150 "$patched" python3 "$repo/bench/gpu_tower_ranks.py" --json "$OUT/two-tower.json" \
        --report "$rows/two_tower.json"
    wait
    results
    rows_of two_tower
}

# What two GPUs are needed or wanted for, the most valuable first. Times are measured last, with
# nothing else running: that waits for the file $AFTER of another run.sh on this machine.
session() {
    two_soak 440
    two_jobs 300 sharded drafting data
    (
        export CUDA_VISIBLE_DEVICES=0
        two_jobs 300 one
        draft_jobs 300
        visibility_job 300
        wait
        draft_compare
    )
    wait
    two_compare
    results
    two_differ 180
    (
        export CUDA_VISIBLE_DEVICES=0
        server_job 240
        reference_job 240
        job memory 240 "$patched" python3 "$here/jobs/checks_memory.py" "$vision" "$rows/memory.json"
        wait
    ) &
    local beside=$!
    (
        export CUDA_VISIBLE_DEVICES=1
        text_dumps 240
        wait
        text_compare
    )
    wait "$beside"
    wait
    results
    while [ -n "${AFTER:-}" ] && [ ! -e "$AFTER" ] && [ "$SECONDS" -lt $((DEADLINE - 330)) ]; do
        sleep 1
    done
    [ -z "${AFTER:-}" ] || [ -e "$AFTER" ] || echo "[session] measured beside other work"
    (
        export CUDA_VISIBLE_DEVICES=0
        serving
    )
    results
    rows_of two two_soak two_differ draft visibility server text reference memory serving
}
