# shellcheck shell=bash
# Sourced by run.sh, whose variables these use. Tower and serving times, nothing else running.
# shellcheck disable=SC2154,SC2317,SC2329,SC2030,SC2031

# Interleaved runs of text engines of both trees, and one of the vision checkpoint.
serving() {
    job serving 400 "$patched" python3 "$repo/bench/gpu_serving.py" measure "$OUT/serving.json" \
        "$rows/serving.json" "$logs" "$stock" "$text" "$patched" "$vision" "${SERVING_SECONDS:-150}"
    wait
}

# The first token of an image request and the image prefill alone.
images() {
    job images 200 "$patched" python3 "$repo/bench/gpu_serving.py" images "$OUT/images.json" \
        "$rows/images.json" "$logs" "$patched" "$vision" 50
    wait
}

tower() {
    job tower 200 "$patched" python3 "$repo/bench/gpu_tower.py" \
        --native "$PIECES/vision.py" --json "$OUT/tower.json" --report "$rows/tower.json"
    wait
    grep -v '^\[check\]\|^INFO' "$logs/tower.log"
}

# With every kind of attention alone, and with what the start chooses.
attention() {
    job attention 400 "$patched" python3 "$here/jobs/checks_attention.py" "$rows/attention.json"
    wait
    grep -v '^INFO' "$logs/attention.log"
    rows_of attention
}

figures() {
    tower
    serving
}
