# shellcheck shell=bash
# Sourced by run.sh, whose variables these use. Jobs: in the background, logged, and failed until they end well.
# shellcheck disable=SC2154,SC2317,SC2329,SC2030,SC2031

# in_tree TREE COMMAND...: each tree has its own vLLM cache, so neither can serve the other's answers.
# The checks take vision_exp from where the patched vLLM takes it, not from the repository.
in_tree() {
    local tree=$1 overlay=
    shift
    [ "$tree" = "$stock" ] || overlay=:$WORK/overlay
    # Where a .pth file leads in an installation; the folder's name changed with its release.
    local dsl=$site/nvidia_cutlass_dsl
    # A vLLM with native vision has its own tree before the shared packages, and needs no overlay.
    [ "$tree" != "$native" ] || overlay='' dsl=$native/nvidia_cutlass_dsl
    PYTHONPATH=$tree:$site:$dsl/dsl_packages:$dsl/python_packages$overlay \
        VLLM_CACHE_ROOT=$home/vllm-$(basename "$tree") "$@"
}

# job NAME SECONDS TREE COMMAND...: in the background, log kept, its end reported. Reports that the
# command names are removed first: an earlier run's rows would pass for its own.
job() {
    local name=$1 limit=$2 tree=$3
    shift 3
    begin "$name" "$@"
    [ $((DEADLINE - SECONDS)) -ge "$limit" ] || limit=$((DEADLINE - SECONDS))
    [ "$limit" -gt 5 ] || { failed "$name" "not run, no time left" && return; }
    (
        begun=$SECONDS
        in_tree "$tree" exec timeout -k 5 "$limit" "$@" >"$logs/$name.log" 2>&1 &
        # `timeout` leaves this script's process group, and hands a signal on to all it has started.
        trap 'kill $!' TERM
        wait $!
        code=$?
        echo "[$name] exit $code after $((SECONDS - begun)) s"
        grep -h '^\[check\]' "$logs/$name.log"
        ended "$name" "$code" || tail -n 25 "$logs/$name.log"
    ) &
}

# compare NAME TREE COMMAND...: at once, in sight; for what compares the results of jobs.
compare() {
    local name=$1 tree=$2 code
    shift 2
    begin "$name"
    in_tree "$tree" "$@"
    code=$?
    ended "$name" "$code"
}

# begin NAME WORD...: until it has ended well it counts as cut off, also where this script is killed.
begin() {
    fresh "$@"
    echo "cut off" >"$rows/$1.failed"
}

# fresh NAME WORD...: what an earlier run of this job left is gone.
fresh() {
    local word
    rm -f "$rows/$1.failed"
    for word in "${@:2}"; do
        case $word in "$rows"/*.json) rm -f "$word" ;; esac
    done
}

# ended NAME CODE: false if it did not end well.
ended() {
    rm -f "$rows/$1.failed"
    [ "$2" = 0 ] || { failed "$1" "exit $2" && return 1; }
}

failed() {
    echo "[$1] FAILED: $2"
    echo "$2" >"$rows/$1.failed"
}

results() {
    fresh results
    tar cz -C "$WORK" rows logs >"$OUT/rows-logs.tgz" || failed results "not packed"
}

# rows_of REPORT...: the table; a failed row or a missing report fails the run.
rows_of() {
    fresh table
    python3 "$here/lib/table.py" "$rows" "$@" || failed table "rows failed or missing"
}
