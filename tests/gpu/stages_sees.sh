# shellcheck shell=bash
# Sourced by run.sh, whose variables this uses. A checkpoint that sees, and what is answered with it.
# shellcheck disable=SC2154,SC2317,SC2329,SC2030,SC2031

sees_fit() {
    local seeing=${SEEING:-$WORK/seeing}
    [ ! -f "$seeing/sees.json" ] || return 0
    job sees-fit 400 "$patched" python3 "$here/checkpoint/tiny_checkpoint.py" "$seeing" \
        --vision-layers 32 --sees
    wait
    tail -n 5 "$logs/sees-fit.log"
}

# LIMIT: seconds that the checks may take after the fit and the start of an engine.
sees() {
    local limit=${LIMIT:-180} seeing=${SEEING:-$WORK/seeing} mode
    rm -f "$WORK"/{eager,graphs,draft}.json
    sees_fit
    [ -f "$seeing/sees.json" ] || return 1
    cp "$seeing/sees.json" "$rows/sees-recipe.txt"
    for mode in eager graphs draft; do
        job "sees-$mode" "$((limit + 150))" "$patched" python3 "$here/jobs/checks_sees.py" "$seeing" "$mode" \
            "$rows/sees_$mode.json" "$WORK/$mode.json" "$limit"
    done
    wait
    compare compare-sees "$patched" python3 "$here/jobs/compare_sees.py" "$rows/sees_modes.json" \
        "$WORK/eager.json" "$WORK"/{graphs,draft}.json
    results
    rows_of sees_eager sees_graphs sees_draft sees_modes
}

# The same checkpoint by ours and by a native vLLM, over HTTP.
sees_served() {
    local seeing=${SEEING:-$WORK/seeing} limit=${LIMIT:-180}
    job sees-served "$((limit + 120))" "$patched" python3 "$here/jobs/checks_sees_served.py" \
        --patched "$patched" --site "$site" --overlay "$WORK/overlay" --native "$native" \
        --vision "$seeing" --logs "$logs" --seconds "$limit" --report "$rows/sees_served.json"
    wait
    rows_of sees_served
}
