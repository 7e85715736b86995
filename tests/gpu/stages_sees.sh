# shellcheck shell=bash
# Sourced by run.sh, whose variables this uses. A checkpoint that sees, and what is answered with it.
# shellcheck disable=SC2154,SC2317,SC2329,SC2030,SC2031

# LIMIT: seconds that the checks may take after the fit, engine starts included.
sees() {
    local limit=${LIMIT:-180} seeing=${SEEING:-$WORK/seeing} mode
    rm -f "$WORK"/{eager,graphs,draft}.json
    if [ ! -f "$seeing/sees.json" ]; then
        job sees-fit 240 "$patched" python3 "$here/checkpoint/tiny_checkpoint.py" "$seeing" \
            --vision-layers 32 --sees
        wait
        tail -n 5 "$logs/sees-fit.log"
    fi
    [ -f "$seeing/sees.json" ] || return 1
    cp "$seeing/sees.json" "$rows/sees-recipe.txt"
    for mode in eager graphs draft; do
        job "sees-$mode" "$((limit + 60))" "$patched" python3 "$here/jobs/checks_sees.py" "$seeing" "$mode" \
            "$rows/sees_$mode.json" "$WORK/$mode.json" "$limit"
    done
    wait
    compare compare-sees "$patched" python3 "$here/jobs/compare_sees.py" "$rows/sees_modes.json" \
        "$WORK/eager.json" "$WORK"/{graphs,draft}.json
    results
    rows_of sees_eager sees_graphs sees_draft sees_modes
}
