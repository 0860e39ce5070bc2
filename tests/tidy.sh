#!/bin/sh
# tidy.sh [sample]: clang-tidy of all C files that are part of the product. `sample` takes less time: the analyzer, which takes
# nearly all of it, sees a twentieth of the files, which the tree's hash draws; the other checks see the parts in mlfab.c, which
# parses each header once.
command -v clang-tidy >/dev/null || { echo "clang-tidy is not installed"; exit 77; }
parts=$(ls core/*/*.c transports/*.c)
others=$(ls tools/*.c)
pkg-config --exists libssl libcrypto 2>/dev/null && others="$others extras/mlfab_tls.c"
pkg-config --exists libcurl 2>/dev/null && others="$others extras/mlfab_curl.c extras/mlfab_http.c"
pkg-config --exists libssl libcrypto libcurl 2>/dev/null &&
  others="$others extras/mlfab_store.c extras/mlfab_remote.c extras/mlfab_sigv4.c"
files="$parts $others"
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
# tidy CHECKS COUNT FILE...: prints what it finds. A process takes so many files.
tidy() {
  checks=$1 count=$2
  shift 2
  # clang-tidy's analyzer follows fewer paths than its 225,000.
  printf '%s\n' "$@" | CHECKS=$checks xargs -P "$jobs" -n "$count" sh -c 'exec clang-tidy --quiet --warnings-as-errors="*" --checks="$CHECKS" \
    --extra-arg=-Xclang --extra-arg=-analyzer-config --extra-arg=-Xclang --extra-arg=max-nodes=60000 "$@" -- -std=c11 -I. 2>/dev/null' tidy
}
# shellcheck disable=SC2086
if [ "${1:-}" = sample ]; then
  tidy '-clang-analyzer-*' 1 mlfab.c || exit 1
  tidy '-clang-analyzer-*' 20 transports/sim.c $others || exit 1
  tree=$(cat $files | cksum | cut -d' ' -f1)
  tidy '-bugprone-*,-misc-*,-performance-*' 1 $(printf '%s\n' $files | awk -v tree="$tree" '(NR + tree) % 20 == 0')
else
  tidy '' 1 $files
fi
