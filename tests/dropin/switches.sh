#!/bin/sh
# switches.sh: compiles mlfab.c without each optional group, without all of them, and in its profiles, each alone
# in an empty folder, where it runs a program of its kind; runs the tests of pushes and pulls with the smallest; checks the
# errors of functions that were left out; and runs two copies in one process. Prints TAP.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
run=${MLFAB_BUILD:-build}/mlfab-run
case $run in /*) ;; *) run=$root/$run ;; esac
built=$(dirname "$run")/mlfab.o # all of it, as make has built it
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
cd "$folder" || exit 1

number=0
status=0

# check NAME COMMAND...: passes when the command succeeds.
check() {
  number=$((number + 1))
  name=$1
  shift
  if "$@" >out.txt 2>err.txt; then
    echo "ok $number - $name"
  else
    echo "not ok $number - $name"
    echo "# $*"
    cat err.txt out.txt | sed 's/^/# /' | head -40
    status=1
  fi
}

# gcc takes 12 s to judge the indentation of so long a file; it judges that of the parts.
warnings="-std=c11 -Wall -Wextra -Werror -Wno-misleading-indentation"
compile="${CC:-cc} -O0 $warnings"
dropin=$root/tests/dropin
# clang warns of functions that nobody uses, also without making anything.
clang=$(command -v clang)
syntax="${clang:-${CC:-cc}} $warnings -fsyntax-only"
# object NAME OBJECT OPTION... FILE: clang makes an object in a third of gcc's time; judged: the other compiler parses the text.
object() {
  what=$1 made=$2
  shift 2
  check "$what" ${clang:-${CC:-cc}} -O0 -fPIE $warnings -c "$@" -o "$made"
}
judged() {
  object "$@"
  shift 2
  [ -z "$clang" ] || check "$what, ${CC:-cc}" ${CC:-cc} $warnings -fsyntax-only "$@"
}
all="-DMLFAB_WITH_COLL=0 -DMLFAB_WITH_SCHED=0 -DMLFAB_WITH_SPARSE=0 -DMLFAB_WITH_RESHARD=0 -DMLFAB_WITH_GROWTH=0 -DMLFAB_WITH_CHECKPOINT=0 -DMLFAB_WITH_DEVICE=0 -DMLFAB_WITH_TELEMETRY=0 -DMLFAB_WITH_LEND=0"

mkdir full && cp "$root/mlfab.h" "$root/mlfab.c" full || exit 1
# Of each two groups, each is left out with the other there, in some of the six rows, but where one needs the other: the bits of
# a number are the rows. A group that needs one that is left out is left out too. Row 1 makes an object, with which programs run
# below. In a full soak each is left out alone, too.
groups="PARTIAL:5 STOCHASTIC:36 DAG:20 COLL:12 SCHED:19 SPARSE:49 RESHARD:18 GROWTH:52 REPLICA:21 KEYS:11 CHECKPOINT:42 DEVICE:37
  TELEMETRY:25 LEND:41 TCP:26 SHM:56"
# One row has the kernels of cblas.
for blas in openblas cblas; do
  if pkg-config --exists $blas 2>/dev/null; then break; fi
  blas=
done
for bit in 1 2 4 8 16 32; do
  left=
  for group in $groups; do [ $((${group#*:} / bit % 2)) = 0 ] || left="$left ${group%:*}"; done
  options=$(printf -- '-DMLFAB_WITH_%s=0 ' $left)
  case $bit,$blas in
    1,*) judged "without$left" less.o $options full/mlfab.c ;;
    2,?*) check "without$left, with $blas" $syntax $options $(pkg-config --cflags $blas) -DMLFAB_WITH_CBLAS=1 full/mlfab.c ;;
    *) check "without$left" $syntax $options full/mlfab.c ;;
  esac
done
if [ "${MLFAB_SCALE:-1}" = 100 ]; then
  for group in $groups; do check "without ${group%:*}" $syntax -DMLFAB_WITH_${group%:*}=0 full/mlfab.c; done
fi
check "without any" $syntax $all -DMLFAB_WITH_TCP=0 -DMLFAB_WITH_SHM=0 full/mlfab.c
object "without any group" none.o $all full/mlfab.c
refuses() { ! "$@" -Wfatal-errors; }
# gcc: clang counts inline functions as unused, of which this build has two.
check "without any group and pushes" $compile $all -DMLFAB_WITH_PUSH=0 -c full/mlfab.c -o barriers.o
judged "compiles without pushes" pushless.o -DMLFAB_WITH_PUSH=0 full/mlfab.c
check "refuses filters without pushes" refuses $compile -DMLFAB_WITH_PUSH=0 -DMLFAB_WITH_SPARSE=1 -c full/mlfab.c
check "refuses a part of what is left out" refuses $compile -DMLFAB_WITH_COLL=0 -DMLFAB_WITH_DAG=1 -c full/mlfab.c
check "refuses replicas without SCHED" refuses $compile -DMLFAB_WITH_SCHED=0 -DMLFAB_WITH_REPLICA=1 -c full/mlfab.c

# program PROFILE FILE: builds a program beside the two files of a profile, which are alone in their folder.
link="-lpthread -lm"
program() { check "builds $2 with $1" $compile -I$1 -o $1/program "$dropin/$2" $1/mlfab.o $link; }
# runs PROFILE OPTION...: runs it under mlfab-run. A dedicated server (-s 1) is of another build: that of mlfab-run.
runs() {
  profile=$1
  shift
  check "$profile runs as $*" "$run" "$@" --timeout 60 "$profile/program"
}

for profile in $(cd "$root" && python3 -c 'import amalgamate; print(*amalgamate.PROFILES)'); do
  check "has $profile of make" cp -r "$(dirname "$built")/profiles/$profile" .
  judged "compiles $profile" $profile/mlfab.o $profile/mlfab.c
  check "$profile exports its functions only" "$dropin/symbols.sh" $profile/mlfab.o
  case $profile in
    minimal)
      program minimal trainer.c
      for how in "-n 2 -s 0 --tcp" "-n 2 -s 1 --shm" "-n 2 -s 1 --tcp" "-n 3 -s 0"; do runs minimal $how; done
      ;;
    coll)
      program coll collect.c
      for how in "-n 1 -s 0" "-n 2 -s 0 --tcp" "-n 3 -s 0 --shm" "-n 3 -s 0" "-n 2 -s 1 --tcp"; do
        runs coll --insecure $how
      done
      ;;
    core)
      program core scheduled.c
      for how in "-n 2 -s 0 --tcp" "-n 3 -s 0"; do runs core --scheduler=beside $how; done
      ;;
    *) check "$profile has a program of its kind" false ;;
  esac
done
check "core refuses vote_dir" $compile -Icore -o votes "$dropin/votes.c" core/mlfab.o -lpthread -lm
check "says what vote_dir needs" ./votes
check "replicas with core" $compile -D_GNU_SOURCE -Icore -o twelve "$root/examples/12_server_dies.c" core/mlfab.o -lpthread -lm
check "a server dies with core" "$run" -n 3 --replicas --set heartbeat_ms=400 --timeout 60 --server ./twelve ./twelve
check "refuses what a profile has not" refuses $compile -DMLFAB_WITH_COLL=1 -c minimal/mlfab.c
check "refuses to leave out what a profile needs" refuses $compile -DMLFAB_WITH_PUSH=0 -c minimal/mlfab.c

# Collectives over MPI, where it is installed.
if command -v mpicc >/dev/null && command -v mpirun >/dev/null; then
  check "builds for MPI with coll" env ${clang:+OMPI_CC=$clang MPICH_CC=$clang} mpicc -O0 $warnings -DMLFAB_WITH_MPI=1 -Icoll -o collect_mpi \
    "$dropin/collect.c" coll/mlfab.c $link
  options="-n 3"
  mpirun --version 2>/dev/null | grep -q "Open MPI" &&
    options="--oversubscribe --bind-to none --mca btl self,vader --mca mpi_yield_when_idle 1 --quiet -n 3"
  for transport in mpi mpi+shm; do
    check "coll runs over $transport" env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
      MLFAB_TRANSPORT=$transport MLFAB_TIMEOUT_MS=60000 mpirun $options ./collect_mpi
  done
fi
check "example 1 with minimal" $compile -Iminimal -o two "$root/examples/01_push_pull.c" minimal/mlfab.o $link
check "runs example 1" "$run" -n 3 --timeout 60 ./two

# Tests that use the public functions only; what they test of other groups they skip.
if echo '#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>' | ${CC:-cc} -E -x c - >/dev/null 2>&1; then
  for test in sim/test_consistency unit/test_alive; do
    check "builds $test with minimal" ${CC:-cc} -std=gnu11 -DWORLD_COMPLETE=0 -I"$root" -o tests \
      "$root/tests/$test.c" minimal/mlfab.o "$(dirname "$built")/mlfab_sim.o" -lcmocka $link
    check "runs $test" ./tests
  done
  check "builds sim/test_collective without pushes" ${CC:-cc} -std=gnu11 -DWITH_MODEL=0 -I"$root" -o tests \
    "$root/tests/sim/test_collective.c" pushless.o "$(dirname "$built")/mlfab_sim.o" -lcmocka $link
  check "runs sim/test_collective" env MLFAB_SCALE=0.1 ./tests
fi

for build in none.o barriers.o minimal/mlfab.o; do
  check "asks $build for what was left out" $compile -I"$root" -o left_out "$dropin/left_out.c" $build $link
  check "is told what was left out" ./left_out
done

# Row 1 has no filters, scheduling, keys or views. Worker 0 serves with it. Worker 1 has filters, and is told.
check "a server without filters" $compile -Ifull -o mixed0 "$dropin/mixed.c" less.o $link
check "a worker with filters" $compile -Ifull -o mixed1 "$dropin/mixed.c" "$built" $link
check "the worker is told which server" "$run" -n 2 -s 0 --insecure --timeout 60 sh -c 'exec ./mixed$MLFAB_RANK'

# A build without pushes at worker 0, which serves; worker 1 defines a model, and is told.
check "a server without pushes" $compile -DNO_PUSH -Ifull -o mixed0 "$dropin/mixed.c" pushless.o $link
check "a worker with pushes" $compile -DNO_PUSH -Ifull -o mixed1 "$dropin/mixed.c" "$built" $link
check "the worker is told which switch" "$run" -n 2 -s 0 --timeout 60 sh -c 'exec ./mixed$MLFAB_RANK'

# mlfab-run makes a key. A build without keys refuses it and says what helps. An mlfab-run without keys makes none.
check "a trainer without keys" $compile -Ifull -o keyless "$dropin/trainer.c" less.o $link
check "is told of --insecure" sh -c '! "$0" -n 2 --timeout 60 ./keyless 2>said.txt >&2 && grep -e --insecure said.txt' "$run"
check "runs with --insecure" "$run" -n 2 --insecure --timeout 60 ./keyless
check "mlfab-run without keys" $compile -D_GNU_SOURCE -DMLFAB_WITH_KEYS=0 -Ifull -o run_keyless \
  "$root/tools/mlfab-run.c" less.o $link
check "runs without keys" ./run_keyless -n 2 --timeout 60 ./keyless

# Two copies: the one in the program has no scheduling, and the other could see its symbols.
check "a copy in the program" $compile -rdynamic -Ifull -o copies "$dropin/copies.c" less.o $link -ldl
echo '{ global: plugin_run; local: *; };' >plugin.map
check "a copy in a shared object" $compile -fPIC -shared -Wl,--version-script=plugin.map -DPLUGIN -Ifull -o copies.so \
  "$dropin/copies.c" "$built" $link
check "two copies do not meet" ./copies ./copies.so "unix:$folder/socket"

echo "1..$number"
exit $status
