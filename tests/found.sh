#!/bin/sh
# found.sh CC CXX NVCC: prints a word for each optional program and library that this machine has. The Makefile builds
# what they allow.
cc=${1:-cc} cxx=${2:-c++} nvcc=${3:-nvcc}
has() { command -v "$1" >/dev/null 2>&1; }
header() { printf '#include <%s>\n' stdarg.h stddef.h stdint.h setjmp.h "$2" | $1 -E - >/dev/null 2>&1; }
library() { has pkg-config && pkg-config --exists "$@" 2>/dev/null; }

has python3 && echo python3
has ccache && echo ccache
header "$cc" cmocka.h && echo cmocka
header "$cc" zmq.h && echo zmq
header "$cxx -x c++" gloo/allreduce.h && echo gloo
library 'libssl >= 1.1.1' && library libcrypto && echo tls
library 'libcurl >= 7.68' && echo curl
for blas in openblas cblas; do
  if library $blas; then echo cblas "cblas:$blas"; break; fi
done
# Debian's names of MPI libraries, else one of another name.
found=
for mpi in openmpi mpich; do
  if has mpicc.$mpi && has mpirun.$mpi; then echo "mpi:$mpi"; found=1; fi
done
[ -n "$found" ] || { has mpicc && has mpirun && echo mpi:default; }
if has "$nvcc"; then echo nvcc; fi
exit 0
