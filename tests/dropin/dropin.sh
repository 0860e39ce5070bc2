#!/bin/sh
# dropin.sh: copies mlfab.h and mlfab.c into an empty folder and uses them as a user may: builds them with the
# installed compilers, without a warning, and runs a trainer with them. Then adds mlfab_sim.h and mlfab_sim.c (of make), and
# simulates. Prints TAP. `dropin.sh quick`: the first compiler only, without optimizing, and one run over each transport.
set -u
quick=${1:-}
root=$(cd "$(dirname "$0")/../.." && pwd)
run=${MLFAB_BUILD:-build}/mlfab-run
case $run in /*) ;; *) run=$root/$run ;; esac
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
cp "$root/mlfab.h" "$root/mlfab.c" "$root/tests/dropin/trainer.c" "$folder" || exit 1
cd "$folder" || exit 1

number=0
status=0

# check NAME COMMAND...: passes when the command succeeds and prints nothing on stderr, but for a machine that was frozen.
check() {
  number=$((number + 1))
  name=$1
  shift
  if "$@" >out.txt 2>err.txt && ! grep -qv "this process did not run for" err.txt; then
    echo "ok $number - $name"
  else
    echo "not ok $number - $name"
    echo "# $*"
    sed 's/^/# /' err.txt | head -40
    status=1
  fi
}

# alone PROGRAM: succeeds, and says on stderr that it is alone and nothing else.
alone() {
  "$@" 2>alone.txt && [ "$(cat alone.txt)" = "mlfab: no launcher has set its variables: a world of one worker" ]
}

skip() {
  number=$((number + 1))
  echo "ok $number - $1 # SKIP $2"
}

has() { command -v "$1" >/dev/null 2>&1; }

# gcc takes 12 s to judge the indentation of so long a file; it judges that of the parts.
warnings="-Wall -Wextra -pedantic -Wno-misleading-indentation"
if [ -n "$quick" ]; then
  check "cc -c mlfab.c" cc -c mlfab.c
  check "builds a trainer" cc -o trainer mlfab.o trainer.c -lpthread -lm
  check "runs alone" alone ./trainer
  check "runs as 2 workers and a server" "$run" -n 2 -s 1 --timeout 60 ./trainer
  check "runs over TCP" "$run" -n 2 -s 1 --tcp --timeout 60 ./trainer
  check "exported symbols" sh "$root/tests/dropin/symbols.sh" mlfab.o
  echo "1..$number"
  exit $status
fi
# make test compiles it with no option; make has compiled it with its own.
made=$(cd "$(dirname "$run")" && pwd)
cp "$made/mlfab.o" . || exit 1
# Arithmetic that is not of the standard: the smallest profile has that of a trainer, and takes a quarter of the time.
# More optimizing shows nothing else.
check "gcc -ffast-math" gcc -std=c11 $warnings -O1 -ffast-math -c "$made/profiles/minimal/mlfab.c" -o fast.o
has clang && check "clang" clang -std=c11 $warnings -c mlfab.c -o clang.o

# Each header alone, in the languages of their users. mlfab.c was built beside mlfab.h only.
headers="mlfab $(cd "$root" && python3 -c 'import amalgamate; print(*[h[:-2] for h in amalgamate.EXPERT_HEADERS])')"
for header in $headers; do
  cp "$root/$header.h" . || exit 1
  echo "#include \"$header.h\"" >header.c
  echo 'int used(const mlfab_config *c) { return (int)c->size; }' >>header.c
  sed 's/int used/extern "C" int used/' header.c >header.cc
  check "$header.h has a guard of its own" grep -q "^#define $(echo $header | tr a-z A-Z)_H\$" $header.h
  for compiler in gcc clang; do
    if has $compiler; then
      check "$header.h as C99, $compiler" $compiler -std=c99 $warnings -fsyntax-only header.c
    else
      skip "$header.h as C99, $compiler" "$compiler is not installed"
    fi
  done
  for compiler in g++ clang++; do
    for standard in c++98 c++17; do
      if has $compiler; then
        check "$header.h as $standard, $compiler" $compiler -std=$standard $warnings -fsyntax-only header.cc
      else
        skip "$header.h as $standard, $compiler" "$compiler is not installed"
      fi
    done
  done
done

# In one translation unit with mlfab.c, which has their declarations, before it and after it; in another dialect, and without
# transports. clang makes a program of it, which runs below.
for header in $headers; do echo "#include \"$header.h\""; done >all.c
(echo '#include "mlfab.c"' && cat all.c) >after.c
(echo '#define _GNU_SOURCE 1' && cat all.c && echo '#include "mlfab.c"') >before.c
without="$warnings -DMLFAB_WITH_TCP=0 -DMLFAB_WITH_STOCHASTIC=0"
check "all headers after mlfab.c, -std=gnu17, without any" cc -std=gnu17 $without -DMLFAB_WITH_SHM=0 -ffast-math -fsyntax-only after.c
check "all headers before mlfab.c, -std=gnu17, without TCP" "$(command -v clang || echo cc)" -std=gnu17 $without -c before.c -o without.o

# With what each compiler has made, without optimizing, and with more than is right.
for build in clang.o mlfab.o fast.o; do
  [ -f $build ] || continue
  check "builds with $build" cc -o trainer $build trainer.c -lpthread -lm
  check "runs alone, $build" alone ./trainer
  check "runs as 2 workers and a server, $build" "$run" -n 2 -s 1 --timeout 60 ./trainer
  check "runs over TCP, $build" "$run" -n 2 -s 1 --tcp --timeout 60 ./trainer
done

# A transport that was left out is named by who needs it.
names_the_switch() {
  "$run" -n 2 -s 1 --tcp --timeout 60 ./without >without.txt 2>&1 && return 1
  grep -q "MLFAB_WITH_TCP=0" without.txt
}
check "builds without TCP" cc -o without without.o trainer.c -lpthread -lm
check "runs over shared memory alone" "$run" -n 2 -s 1 --shm --timeout 60 ./without
check "says what was left out" names_the_switch

# Another C library, without the kernel's headers on its path, and with small stacks.
if has musl-gcc; then
  # Its own gcc judges all, and clang makes the object, in a third of the time.
  musl="-std=c11 $warnings"
  check "musl-gcc -std=c11" musl-gcc $musl -fsyntax-only mlfab.c
  include=$(musl-gcc -E -v -x c /dev/null 2>&1 | sed -n '/^#include </,/^End/s/^ //p' | grep musl)
  if has clang && [ -n "$include" ]; then
    check "clang, with the headers of musl" clang -std=c11 -w -fPIE -nostdlibinc -isystem "$include" -c mlfab.c -o musl.o
  else
    check "musl-gcc makes an object" musl-gcc $musl -c mlfab.c -o musl.o
  fi
  check "links with musl" musl-gcc $musl -o musl musl.o trainer.c -lpthread -lm
  check "runs alone, musl" alone ./musl
  check "runs as 2 workers and a server, musl" "$run" -n 2 -s 1 --timeout 60 ./musl
  check "runs over TCP, musl" "$run" -n 2 -s 1 --tcp --timeout 60 ./musl
else
  skip "musl" "musl-gcc is not installed"
fi

# The linker may warn of getaddrinfo, which needs the C library's files when the program runs.
link_static() { cc -static -o static mlfab.o trainer.c -lpthread -lm 2>static.txt; }
if echo 'int main(void) { return 0; }' >s.c && cc -static -o s s.c 2>/dev/null; then
  check "links statically" link_static
  check "runs alone, static" alone ./static
  check "runs as 2 workers and a server, static" "$run" -n 2 -s 1 --timeout 60 ./static
else
  skip "static" "no static C library"
fi

cp "$root/mlfab_sim.h" "$(dirname "$run")/mlfab_sim.c" "$root/examples/02_hello_sim.c" . || exit 1
check "cc -c mlfab_sim.c" cc $warnings -c mlfab_sim.c
sed 's/include "mlfab.*h"/include "mlfab_sim.h"/' header.c >sim_header.c
sed 's/include "mlfab.*h"/include "mlfab_sim.h"/' header.cc >sim_header.cc
for compiler in gcc clang; do
  if has $compiler; then
    check "the simulator, $compiler" $compiler -std=c11 $warnings -fsyntax-only mlfab_sim.c
    check "its header as C99, $compiler" $compiler -std=c99 $warnings -fsyntax-only sim_header.c
  else
    skip "the simulator, $compiler" "$compiler is not installed"
  fi
done
if has g++; then
  check "its header as c++98, g++" g++ -std=c++98 $warnings -fsyntax-only sim_header.cc
else
  skip "its header as c++98" "g++ is not installed"
fi
check "builds with the simulator" cc -o hello mlfab.o mlfab_sim.o 02_hello_sim.c -lpthread -lm
check "runs in the simulator" ./hello

check "exported symbols" sh "$root/tests/dropin/symbols.sh" mlfab.o mlfab_sim.o
echo "1..$number"
exit $status
