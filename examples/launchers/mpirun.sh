#!/bin/sh
# mpirun.sh - starts a trainer with mpirun, of Open MPI or MPICH, which gives every process its rank.
#
#   mpirun.sh 8 ./trainer                        on this host
#   HOSTS=node1:4,node2:4 mpirun.sh 8 ./trainer  on several hosts, which see the same files; four processes on each
#   MLFAB_TRANSPORT=mpi mpirun.sh 8 ./trainer    a trainer that was built with mpicc -DMLFAB_WITH_MPI=1, over MPI itself
#
# MPIRUN names another mpirun, for example mpirun.mpich.
set -eu
mpirun=${MPIRUN:-mpirun} processes=${1:?is missing: the number of processes}
shift
case ${MLFAB_TRANSPORT:-} in
  mpi*) ;;
  *)
    # Rank 0, where server 0 is, runs on the first host.
    if [ -n "${HOSTS:-}" ]; then
      export MLFAB_COORDINATOR="${MLFAB_COORDINATOR:-tcp:${HOSTS%%[:,]*}:${PORT:-29400}}"
      # Make it once: (umask 077; openssl rand -hex 32 >~/.mlfab-key)
      [ -n "${MLFAB_KEY:-}" ] || export MLFAB_KEY_FILE="${MLFAB_KEY_FILE:-$HOME/.mlfab-key}"
    else
      export MLFAB_COORDINATOR="${MLFAB_COORDINATOR:-unix:@trainer-$$}"
    fi
    ;;
esac
if "$mpirun" --version | grep -q 'Open MPI\|OpenRTE'; then
  for name in $(env | sed -n 's/^\(MLFAB_[A-Z_0-9]*\)=.*/\1/p'); do set -- -x "$name" "$@"; done
  exec "$mpirun" -n "$processes" ${HOSTS:+--host "$HOSTS"} "$@"
fi
exec "$mpirun" -n "$processes" ${HOSTS:+-hosts "$HOSTS"} "$@" # MPICH gives the environment to all
