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
# tidy CHECKS FILE...: prints what it finds.
tidy() {
  checks=$1
  shift
  # clang-tidy's analyzer follows fewer paths than its 225,000.
  printf '%s\n' "$@" | xargs -P "$jobs" -I {} clang-tidy --quiet --warnings-as-errors='*' --checks="$checks" \
    --extra-arg=-Xclang --extra-arg=-analyzer-config --extra-arg=-Xclang --extra-arg=max-nodes=60000 {} -- -std=c11 -I. 2>/dev/null
}
# shellcheck disable=SC2086
if [ "${1:-}" = sample ]; then
  tidy '-clang-analyzer-*' mlfab.c transports/sim.c $others || exit 1
  tree=$(cat $files | cksum | cut -d' ' -f1)
  files=$(printf '%s\n' $files | awk -v tree="$tree" '(NR + tree) % 20 == 0')
fi
tidy '' $files
