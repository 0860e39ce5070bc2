#!/bin/sh
#SBATCH --job-name=trainer
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
# slurm.sh - a batch job of Slurm: srun gives every process its rank.
#
#   sbatch slurm.sh ./trainer                                   on one node
#   (umask 077; openssl rand -hex 32 >~/.mlfab-key)             once: the key for several nodes
#   sbatch --nodes=2 --ntasks-per-node=8 slurm.sh ./trainer     on several nodes
#   sbatch slurm.sh --mpi=pmix ./trainer                        over MPI, with MLFAB_TRANSPORT=mpi: see docs/clusters.md
: "${SLURM_JOB_ID:?is not set: start this script with sbatch}" # processes of another job, or of an earlier start, are refused
case ${MLFAB_TRANSPORT:-} in
  mpi*) ;;
  *)
    # Rank 0, where server 0 is, runs on the first node.
    if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
      first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
      export MLFAB_COORDINATOR="${MLFAB_COORDINATOR:-tcp:$first:29400}"
      [ -n "${MLFAB_KEY:-}" ] || export MLFAB_KEY_FILE="${MLFAB_KEY_FILE:-$HOME/.mlfab-key}"
    fi
    ;;
esac
exec srun "$@"
