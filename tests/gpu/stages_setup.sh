# shellcheck shell=bash
# Sourced by run.sh, whose variables these stages use: from the pieces to patched trees, and back to
# a pack of the kernels that were compiled.
# shellcheck disable=SC2154,SC2317,SC2329,SC2030,SC2031

# From nothing, whatever an earlier one left: that may have been another vLLM.
setup() {
    set -e
    compgen -G "$PIECES/piece.*" >/dev/null || [ -f "$PIECES/links.txt" ] || {
        echo "[setup] no piece.* in $PIECES; the head of tests/gpu/run.sh says what belongs there"
        return 2
    }
    rm -rf "$WORK/set-up" "$WORK/python" "$site" "$stock" "$patched" "$WORK/overlay" "${rows:?}"
    rm -rf "$native"
    mkdir -p "$site" "$stock" "$rows"
    begin setup
    local wheel
    for wheel in "$PIECES"/*.whl; do
        "$machine_python" -m zipfile -e "$wheel" "$site"
    done
    if [ -f "$PIECES/links.txt" ]; then own_torch; else cat "$PIECES"/piece.* | tar xz -C "$site"; fi
    local kept
    for kept in "$PIECES"/cache*.tgz; do
        [ ! -f "$kept" ] || tar xzf "$kept" -C "$home"
    done
    mv "$site/vllm" "$stock/vllm"
    # FlashInfer 0.6.13 takes TileLang's libcudart_stub.so for the CUDA runtime when it is imported.
    local packages
    for packages in "$site" "$native"; do
        [ ! -d "$packages/flashinfer" ] ||
            sed -i 's/if lib_name in line:/if lib_name in line and "_stub" not in line:/' \
                "$packages/flashinfer/comm/cuda_ipc.py"
    done
    cp -al "$stock" "$patched"
    patch
    if [ -z "${CHECKPOINTS:-}" ]; then
        PYTHONPATH=$site python3 "$here/checkpoint/tiny_checkpoint.py" "$vision" --vision-layers 32 &
        local writing=$!
        PYTHONPATH=$site python3 "$here/checkpoint/tiny_checkpoint.py" "$text" --text-only
        wait "$writing"
    fi
    du -sh "$vision" "$text"
    fresh setup
    touch "$WORK/set-up"
    set +e
}

# A Python that does not see the machine's torch, the pieces' own, and links to CUDA libraries that
# the machine has in the pinned versions.
own_torch() {
    local stream path libraries unpacking=()
    "$machine_python" -m venv --without-pip "$WORK/python"
    libraries=$("$machine_python" -c 'import nvidia; print(next(iter(nvidia.__path__)))')
    for stream in a b; do
        unpack "$stream" "$site" &
        unpacking+=($!)
    done
    if [ -f "$PIECES/c.00" ]; then mkdir -p "$native" && unpack c "$native"; fi
    wait "${unpacking[0]}"
    wait "${unpacking[1]}"
    while read -r path; do
        [ -e "$libraries/${path#nvidia/}" ] || { echo "[setup] absent: $path" && continue; }
        mkdir -p "$site/$(dirname "$path")"
        ln -sfn "$libraries/${path#nvidia/}" "$site/$path"
    done <"$PIECES/links.txt"
}

# unpack STREAM FOLDER: pieces of one zstd stream of tar.
unpack() {
    cat "$PIECES/$1".?? | PYTHONPATH=$site "$machine_python" -c 'import sys, zstandard
zstandard.ZstdDecompressor(max_window_size=2**27).copy_stream(sys.stdin.buffer, sys.stdout.buffer)' |
        tar x -C "$2"
}

patch() {
    PYTHONPATH=$site VLLM_CACHE_ROOT=$home/vllm-patched python3 "$repo/hotfix.py" \
        --root "$patched/vllm" --overlay-root "$WORK/overlay" apply
}

# Without the driver's own cache: large, and quick to make again.
cache() {
    (cd "$home" && find . -type f -newer "$WORK/set-up" -not -path './.nv/*' -print0) |
        tar cz -C "$home" --null -T - >"$OUT/cache.tgz" && ls -l "$OUT/cache.tgz"
}
