#!/bin/sh
# symbols.sh FILE...: every symbol that an object or a shared library exports begins with mlfab_, and
# none with mlfab__, the prefix of internals.
status=0
for file in "$@"; do
  case $file in
    *.so) names=$(nm -D --defined-only "$file" | awk '$2 != "A" && $2 != "w" { print $3 }') ;;
    *) names=$(nm -g --defined-only "$file" | awk 'NF == 3 { print $3 }') ;;
  esac
  # Symbols that linkers and sanitizers add to every library.
  bad=$(printf '%s\n' "$names" | grep -Ev '^mlfab_[^_]|^_(init|fini|edata|end)$|^__bss_start$|^__(asan|odr_asan)')
  count=$(printf '%s\n' "$names" | grep -c '^mlfab_')
  if [ -n "$bad" ] || [ "$count" -eq 0 ]; then
    echo "$file exports $count symbols of mlfab, and these, which it must not:"
    printf '%s\n' "$bad"
    status=1
  else
    echo "$file exports $count symbols, all with the prefix"
  fi
done
exit $status
