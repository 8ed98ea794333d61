#!/usr/bin/env bash
# The steps of tests/gpu/README.md, one after another, each with a limit and a file of its own in FOLDER; one that fails does
# not end the rest. On a machine without a GPU, with MPISTRAT_TEST_GPU= and tests/fakes on PYTHONPATH, a rehearsal.
# usage: tests/gpu/session.sh FOLDER [PART...]      parts, in order: look test bench growth direct sanitize
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 2
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
shift
export MPISTRAT_TEST_GPU=${MPISTRAT_TEST_GPU-1} OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
sizes=${SIZES-4KiB,256KiB,4MiB,64MiB,256MiB} times=${TIMES-10000} seconds=${SECONDS_OF_A_SIZE-4}
failed=0

step() { # NAME LIMIT COMMAND...
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1
    status=$?
    [ $status = 0 ] || failed=1
    printf '%-26s exit %3d %4d s  %s\n' "$name" $status $((SECONDS - start)) "$(tail -n 1 "$out/$name.txt" | cut -c1-150)"
}
on() { # NAME LIMIT N COMMAND...: under N ranks
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" python3 -m mpistrat run -n "$@"
}

look() {
    step nvidia-smi 20 bash -c 'nvidia-smi; nvidia-smi topo -m; nvidia-smi -q -d COMPUTE,MEMORY | head -60; nproc; df -h /dev/shm'
    step info 60 python3 -m mpistrat info
    on info-2 60 2 -m mpistrat info
    on first-kernel 90 1 -m pytest -q -x tests/ranks/test_gpu_training.py -k half_precision
}
test_() {
    on collectives-2 150 2 -m pytest -q tests/ranks/test_gpu_collectives.py
    on training-2 150 2 -m pytest -q tests/ranks/test_gpu_training.py
    for n in 1 4; do
        on tests-$n 150 $n -m pytest -q tests/ranks/test_gpu_collectives.py tests/ranks/test_gpu_training.py
    done
    step commands 200 python3 -m pytest -q tests/gpu
}
bench() {
    for n in 1 2 4; do
        on bench-$n 150 $n -m mpistrat bench allreduce --device cuda --algorithm all --sizes "$sizes" \
            --repetitions 9 --seconds "$seconds" --json "$out/bench-$n.json"
    done
    on bandwidth 100 1 tests/gpu/bandwidth.py
}
growth() {
    on growth 300 2 tests/gpu/growth.py --times "$times"
}
direct() { # with a CUDA-aware MPI first on PATH and LD_LIBRARY_PATH
    on direct-info 60 2 -m mpistrat info
    on direct-check 60 2 -m mpistrat check --gpu-direct
    on direct-bench 150 2 -m mpistrat bench allreduce --device cuda --algorithm all --device-pointers --sizes "$sizes" \
        --repetitions 9 --seconds "$seconds" --json "$out/direct-bench.json"
    MPISTRAT_GPU_DIRECT=on on direct-tests 120 2 -m pytest -q tests/ranks/test_gpu_collectives.py
}
sanitize() { # kernels were compiled, and kept, by the tests
    local files=tests/ranks/test_gpu_training.py
    step memcheck 240 compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q $files \
        -k 'half_precision or steps_as'
    step racecheck 90 compute-sanitizer --tool racecheck --error-exitcode 9 python3 -m pytest -q $files -k half_precision
}

[ $# -gt 0 ] || set -- look test bench growth sanitize
for part; do
    case $part in
    look | bench | growth | direct | sanitize) $part ;;
    test) test_ ;;
    *) echo "$part is no part: look test bench growth direct sanitize" >&2; exit 2 ;;
    esac
done
exit $failed
