#!/bin/sh
# torchrun.sh - starts a trainer with torchrun, which gives every process its rank.
#
#   torchrun.sh 4 ./trainer                             four processes on this host
#   NODES=2 FIRST=node1 torchrun.sh 4 ./trainer         the same command on both hosts: four processes on each
#   NODES=3 FIRST=node1 NODE_RANK=0 torchrun.sh 4 ./trainer  on more hosts each one has a number; that of the first is 0
#
# TORCHRUN_OPTIONS: more options of torchrun. That of Debian 12 (PyTorch 1.13 with Python 3.11) starts nothing without
# "--redirects 1 --tee 1", with which it puts the rank before each line.
set -eu
options=${TORCHRUN_OPTIONS:-} processes=${1:?is missing: the number of processes on each host}
shift
# shellcheck disable=SC2086
set -- $options --nproc_per_node "$processes" --no_python "$@"
if [ "${NODES:-1}" -gt 1 ]; then
  # The first host is number 0: rank 0, where server 0 is, must be there. torchrun itself listens at port 29500.
  export MLFAB_COORDINATOR="${MLFAB_COORDINATOR:-tcp:$FIRST:29400}"
  # Make it once: (umask 077; openssl rand -hex 32 >~/.mlfab-key)
  [ -n "${MLFAB_KEY:-}" ] || export MLFAB_KEY_FILE="${MLFAB_KEY_FILE:-$HOME/.mlfab-key}"
  number=1
  case " $(hostname) $(hostname -s) $(hostname -I) " in *" $FIRST "*) number=0 ;; esac
  [ "$NODES" -eq 2 ] || : "${NODE_RANK:?is not set: the number of this host, from 0 to $((NODES - 1))}"
  exec torchrun --nnodes "$NODES" --node_rank "${NODE_RANK:-$number}" --master_addr "$FIRST" --master_port 29500 "$@"
fi
exec torchrun --standalone "$@"
