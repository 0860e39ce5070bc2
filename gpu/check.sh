#!/bin/sh
# check.sh - builds, checks and times everything in gpu/ in one call, and ends with a table. For a machine with a GPU; without one
# it says what was skipped. In the root of the repository: gpu/check.sh [nvcc]
set -u
cd "$(dirname "$0")/.." || exit 1
nvcc=${1:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
out=build/gpu-check
mkdir -p "$out"
failed=0
: >"$out/table"

# Runs a command; a line of the table says how it ended.
step() {
  name=$1
  shift
  echo "==== $*"
  "$@" >"$out/log" 2>&1
  status=$?
  cat "$out/log"
  case $status in
    0)
      how=ok
      skipped=$(grep -c '# SKIP' "$out/log")
      [ "$skipped" -eq 0 ] || how="$skipped skipped: $(sed -n 's/.*# SKIP //p' "$out/log" | head -n 1)"
      ;;
    77) how="skipped: $(tail -n 1 "$out/log")" ;;
    *) how="FAILED (status $status)" failed=1 ;;
  esac
  printf '%-28s %s\n' "$name" "$how" >>"$out/table"
}

step "compiles" make NVCC="$nvcc" gpu
step "attach, played runtime" build/tests/gpu/gpu_attach
step "elements on the CPU" build/tests/unit/test_gpu_elements
step "kernels" build/tests/gpu/gpu_kernels
if command -v compute-sanitizer >/dev/null 2>&1; then
  for tool in memcheck racecheck; do
    step "kernels, $tool" env MLFAB_SCALE=0.1 compute-sanitizer --tool "$tool" --error-exitcode 1 build/tests/gpu/gpu_kernels
  done
else
  printf '%-28s %s\n' "compute-sanitizer" "skipped: it is not installed" >>"$out/table"
fi
step "a trainer, 1 worker" build/mlfab-run -n 1 -s 1 build/gpu/14_gpu --generated --epochs 2
step "a trainer, 2 workers" build/mlfab-run -n 2 -s 1 build/gpu/14_gpu --generated --epochs 2
step "speed" build/tests/gpu/gpu_bench

echo
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo "no GPU"
"$nvcc" --version | tail -n 1
cat "$out/table"
exit $failed
