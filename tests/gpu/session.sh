#!/usr/bin/env bash
# The steps of tests/gpu/README.md, what is worth most first, each with a limit of its own and all within SECONDS; one that
# fails does not end the rest. After each step FOLDER has, in three files: figures.json, what is to be shown and what was;
# summary.txt, a line for each step; log.txt, what they printed. What earlier calls found is kept, and is in them too.
# On a machine without a GPU, with MPISTRAT_TEST_GPU= and tests/fakes on PYTHONPATH, a rehearsal.
# usage: tests/gpu/session.sh FOLDER SECONDS [PART...]      parts, in order: look test bench growth job more direct sanitize
set -u -o pipefail
shopt -s globstar
cd "$(dirname "$0")/../.." || exit 2
[ $# -ge 2 ] && [ "$2" -gt 0 ] 2>/dev/null || { sed -n 's/^# usage: //p' "$0" >&2; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
end=$((SECONDS + $2))
shift 2
steps=${SESSION_STEPS:-$PWD/.gpu-session}
mkdir -p "$steps" || exit 2
export MPISTRAT_TEST_GPU=${MPISTRAT_TEST_GPU-1} OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 COLUMNS=150
sizes=${SIZES-4KiB,256KiB,4MiB,64MiB,256MiB} times=${TIMES-10000} seconds=${SECONDS_OF_A_SIZE-4}
failed=0

step() { # NAME LIMIT COMMAND...
    local name=$1 limit=$2 start=$SECONDS status left=$((end - SECONDS - 8))
    shift 2
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 5 ]; then
        line "$name" "-" 0 "not begun: no time was left"
        failed=1
        return
    fi
    timeout -k 3 "$limit" "$@" >"$steps/$name.txt" 2>&1
    status=$?
    echo $status >"$steps/$name.status"
    [ $status = 0 ] || failed=1
    { printf '\n===== %s: %s\n' "$name" "$*" && tail -c 300000 "$steps/$name.txt"; } >>"$steps/log"
    line "$name" $status $((SECONDS - start)) "$(grep -av '^ *$' "$steps/$name.txt" | tail -n 1 | cut -c1-150)"
}
line() { # NAME STATUS SECONDS TEXT
    printf '%-14s exit %3s %4d s  %s\n' "$@" | tee -a "$steps/summary"
    cp "$steps/summary" "$out/summary.txt"
    tail -c 12000000 "$steps/log" >"$out/log.txt" 2>/dev/null
    python3 tests/gpu/figures.py "$steps" "$out"
}
on() { # NAME LIMIT N COMMAND...: under N ranks
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" python3 -m mpistrat run -n "$@"
}
on_gpu() { # of the tests under several ranks, those that need one
    on "$1" "$2" "$3" -m pytest -q --maxfail=20 tests/ranks/**/test_{gpu_*,*_gpu}.py
}

look() {
    step machine 20 bash -c 'nvidia-smi; nvidia-smi topo -m; nvidia-smi -q -d COMPUTE,MEMORY | head -60; nproc; df -h /dev/shm; uname -a'
    on info-2 60 2 -m mpistrat info
    on first-kernel 90 1 -m pytest -q -x tests/ranks/training/test_gpu_training.py -k half_precision
}
test_() {
    on_gpu tests-2 270 2
}
bench() {
    local n
    for n in 2 4 1; do
        on bench-$n 150 $n benchmarks/communication/allreduce_gpu.py --here --algorithm all --sizes "$sizes" \
            --repetitions 9 --seconds "$seconds" --json "$steps/bench-$n.json"
        [ $n != 2 ] || on bandwidth 100 1 tests/gpu/bandwidth.py --json "$steps/bandwidth.json"
    done
}
growth() {
    on growth 330 2 tests/gpu/growth.py --times "$times" --seconds 60 --json "$steps/growth.json"
}
job() {
    local device
    for device in cpu cuda; do
        on job-$device 60 2 docs/examples/train_digits.py --device $device --epochs "${EPOCHS-10}" \
            --data-dir "$steps/digits" --out "$steps/job-$device"
    done
}
more() {
    on_gpu tests-4 180 4
    on_gpu tests-1 120 1
    step commands 150 python3 -m pytest -q tests/gpu
}
direct() { # with a CUDA-aware MPI first on PATH and LD_LIBRARY_PATH
    on direct-info 30 2 -m mpistrat info
    on direct-check 30 2 -m mpistrat check --gpu-direct
    on direct-bench 150 2 benchmarks/communication/allreduce_gpu.py --here --algorithm all --device-pointers --sizes "$sizes" \
        --repetitions 9 --seconds "$seconds" --json "$steps/direct-bench.json"
    MPISTRAT_GPU_DIRECT=on on direct-tests 180 2 -m pytest -q tests/ranks/collectives/gpu/test_gpu_moves.py
}
sanitize() { # kernels were compiled, and kept, by the tests
    local files=tests/ranks/training/test_gpu_training.py
    step memcheck 200 compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q $files \
        -k 'half_precision or steps_as'
    step racecheck 90 compute-sanitizer --tool racecheck --error-exitcode 9 python3 -m pytest -q $files -k half_precision
}

[ $# -gt 0 ] || set -- look test bench growth job more sanitize
for part; do
    case $part in
    look | bench | growth | job | more | direct | sanitize) $part ;;
    test) test_ ;;
    *) echo "$part is no part: look test bench growth job more direct sanitize" >&2; exit 2 ;;
    esac
done
exit $failed
