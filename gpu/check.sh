#!/bin/sh
# check.sh - builds, checks and times everything in gpu/ in one call, and ends with a table: check, result, seconds. For a machine
# with a GPU; without one it says what was skipped, and what was computed on the host instead. Exit status 1 when something failed.
# In the root of the repository: gpu/check.sh [nvcc]. GPU_ARCHS=90 compiles for one kind of GPU only.
set -u
cd "$(dirname "$0")/.." || exit 1
nvcc=${1:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
out=build/gpu-check
limit=900 # seconds of a check
failed=0
mkdir -p "$out"
: >"$out/table"

row() { printf '%-30s %-78s %7s\n' "$1" "$2" "$3" >>"$out/table"; }

# What a log says of a check that ended with 0.
ended_well() {
  skipped=$(grep -c '# SKIP' "$out/log")
  missed=$(grep -o MISSED "$out/log" | wc -l)
  if [ "$skipped" -ne 0 ]; then
    echo "ok, $skipped skipped: $(sed -n 's/.*# SKIP //p' "$out/log" | head -n 1)"
  elif [ "$missed" -ne 0 ]; then
    echo "ok, $missed goals missed"
  elif grep -q 'no GPU (' "$out/log"; then
    echo "ok, on the host: no GPU"
  else
    echo ok
  fi
}

# Runs a command for so many seconds at most, where the system can do that.
limited() {
  if command -v timeout >/dev/null 2>&1; then
    timeout -k 10 "$@"
  else
    shift
    "$@"
  fi
}

# Runs a command; a line of the table says how it ended. status=N before it: it has to end with N.
step() {
  name=$1
  shift
  echo "==== $*"
  began=$(date +%s)
  wanted=0
  case $1 in status=*) wanted=${1#status=} && shift ;; esac
  limited "$limit" "$@" >"$out/log" 2>&1
  status=$?
  if [ $status -eq "$wanted" ]; then status=0; elif [ $status -eq 0 ]; then status=1; fi
  seconds=$(($(date +%s) - began))
  cat "$out/log"
  case $status in
    0) how=$(ended_well) ;;
    77) how="skipped: $(tail -n 1 "$out/log")" ;;
    124) how="FAILED: not finished after $limit s" failed=1 ;;
    *) how="FAILED: exit status $status" failed=1 ;;
  esac
  row "$name" "$how" "$seconds"
}

# The same, where what it needs is here: a word for the table, and 1 or 0.
step_with() {
  need=$1 have=$2
  shift 2
  if [ "$have" -ne 0 ]; then step "$@"; else row "$1" "skipped: $need" 0; fi
}

finish() {
  echo
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo "no GPU"
  "$nvcc" --version 2>/dev/null | tail -n 1
  printf '%-30s %-78s %7s\n' check result seconds
  cat "$out/table"
  exit $failed
}

step "compiles" make NVCC="$nvcc" gpu
# What an earlier call may have built is not what is here now.
[ $failed -eq 0 ] || finish

cmocka=$(make --no-print-directory NVCC="$nvcc" help | grep -c '^ *cmocka *yes')
python=$(command -v python3 | grep -c .)
sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")
sanitizers=$([ -x "$sanitizer" ] && echo 1 || echo 0)

# On the CPU.
step_with cmocka "$cmocka" "attach, played runtime" build/tests/gpu/gpu_attach
step_with cmocka "$cmocka" "elements on the CPU" build/tests/unit/test_gpu_elements
step_with cmocka "$cmocka" "staging, played device" build/tests/unit/test_device
step_with cmocka "$cmocka" "device to device, played" build/tests/unit/test_device_direct
step_with cmocka "$cmocka" "server's model, played device" build/tests/unit/test_resident
step_with cmocka "$cmocka" "threads, played devices" build/tests/conform/test_device

# On the GPU.
step "kernels" build/tests/gpu/gpu_kernels
for tool in memcheck racecheck; do
  step_with compute-sanitizer "$sanitizers" "kernels, $tool" \
    env MLFAB_SCALE=0.1 "$sanitizer" --tool "$tool" --error-exitcode 1 build/tests/gpu/gpu_kernels
done
fabric=build/tests/gpu/gpu_fabric
for rule in sgd momentum adam; do
  step "processes, $rule" build/mlfab-run -n 3 -s 2 --set "optimizer=$rule" --server $fabric $fabric
done
step "processes, one is killed" status=137 build/mlfab-run -n 3 -s 2 --on-failure=continue --server $fabric $fabric --kill
step_with compute-sanitizer "$sanitizers" "processes, memcheck" \
  build/mlfab-run -n 2 -s 2 --server $fabric "$sanitizer" --tool memcheck --error-exitcode 1 $fabric
printf '#!/bin/sh\nexec "%s" --tool memcheck --error-exitcode 1 %s\n' "$sanitizer" $fabric >"$out/server"
chmod +x "$out/server"
step_with compute-sanitizer "$sanitizers" "server on the GPU, memcheck" \
  build/mlfab-run -n 2 -s 1 --server "$out/server" $fabric
step "a trainer, 1 worker" build/mlfab-run -n 1 -s 1 build/gpu/14_gpu --generated --epochs 2
step "a trainer, 2 workers" build/mlfab-run -n 2 -s 1 build/gpu/14_gpu --generated --epochs 2
step_with python3 "$python" "all cases of processes" python3 tests/process/gpu_test.py
step "speed of kernels" build/tests/gpu/gpu_bench
step "speed of processes" build/mlfab-run -n 2 -s 1 $fabric --time 100
step "the same, server on the GPU" build/mlfab-run -n 2 -s 1 --server $fabric $fabric --time 100

# The same with CUDA's Multi-Process Service, one of this call alone: processes then do not take turns on the GPU.
mps=0 why="nvidia-cuda-mps-control, or a GPU" pipes=
end_mps() {
  [ -n "$pipes" ] || return 0
  [ "$mps" -eq 0 ] || echo quit | limited 30 nvidia-cuda-mps-control >/dev/null 2>&1
  rm -rf "$pipes"
  pipes=
}
trap end_mps EXIT
trap 'exit 1' INT TERM
if [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then
  why="the rows above have it already"
elif command -v nvidia-cuda-mps-control >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU && pipes=$(mktemp -d); then
  export CUDA_MPS_PIPE_DIRECTORY="$pipes" CUDA_MPS_LOG_DIRECTORY="$pipes"
  if limited 30 nvidia-cuda-mps-control -d; then mps=1; else why="MPS does not start"; fi
fi
step_with "$why" "$mps" "processes, MPS" build/mlfab-run -n 3 -s 2 --server $fabric $fabric
step_with "$why" "$mps" "speed of processes, MPS" build/mlfab-run -n 2 -s 1 $fabric --time 100
end_mps
finish
