# shellcheck shell=bash
# Sourced by run.sh, whose variables these use. Ours beside a vLLM with native vision, on one GPU.
# shellcheck disable=SC2154,SC2317,SC2329,SC2030,SC2031

# beside_job NAME SECONDS VERB WORD...: the client runs in ours, whose overlay it does not use.
# What was measured is in WORK, to go on with, and in OUT after every value.
beside_job() {
    job "$1" "$2" "$patched" python3 "$here/jobs/checks_beside.py" "$3" --patched "$patched" --site "$site" \
        --overlay "$WORK/overlay" --native "$native" --vision "$vision" --text "$text" \
        --logs "$logs" --kept "$WORK/beside.jsonl" --copy "$OUT/beside.jsonl" \
        --data "$WORK/beside-data" --rows "$rows" --seconds "$(($2 - 30))" "${@:4}"
    wait
    grep -h '^\[beside\]' "$logs/$1.log"
    cp "$logs/$1.log" "$logs"/beside-*-serve.log "$OUT/"
}

warm_native() {
    job warm-native 560 "$native" nice -n 5 python3 "$here/jobs/warm_kernels.py" --jobs 14
    wait
    grep -h '^\[warm\]' "$logs/warm-native.log"
}

beside_warm() {
    warm_native
    beside_job beside-warm $((590 - SECONDS)) measure --runs 0
}

beside() {
    beside_job beside "${BESIDE_SECONDS:-570}" measure --runs 5
    results
    rows_of beside_prompts
    python3 "$repo/bench/beside.py" "$WORK/beside.jsonl"
}

beside_start() {
    beside_job beside-start "${BESIDE_SECONDS:-450}" start --runs 5
    results
    python3 "$repo/bench/beside.py" "$WORK/beside.jsonl"
}
