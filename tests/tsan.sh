#!/bin/sh
# tsan.sh PROGRAM: runs a program built with -fsanitize=thread. Its run-time library stops on kernels
# that spread addresses widely, so that is turned off where setarch may do it.
if command -v setarch >/dev/null && setarch "$(uname -m)" -R true 2>/dev/null; then
  exec setarch "$(uname -m)" -R "$@"
fi
exec "$@"
