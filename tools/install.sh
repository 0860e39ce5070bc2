#!/bin/sh
# install.sh install|uninstall: puts what make has built into its folders under $DESTDIR, or removes it: both follow this
# list. The Makefile passes the variables.
set -e
case $1 in install | uninstall) ;; *) echo "install.sh: '$1' is neither install nor uninstall" >&2; exit 2 ;; esac
trap 'rm -f "$path.new"' EXIT
doing=$1 include=$PREFIX/include bin=$PREFIX/bin share=$PREFIX/share cmake=$LIBDIR/cmake/mlfab completions=$PREFIX/share/bash-completion/completions

# put MODE PATH COMMAND...: a file with what the command prints. MODE link: a symbolic link to it.
put() {
  mode=$1 path=$DESTDIR$2
  shift 2
  echo "  $path"
  rm -f "$path"
  if [ "$doing" = uninstall ]; then return; fi
  $INSTALL -d "${path%/*}"
  if [ "$mode" = link ]; then ln -s "$1" "$path"; return; fi
  "$@" >"$path.new"
  $INSTALL -m "$mode" "$path.new" "$path"
  rm "$path.new"
}
# copy MODE FOLDER FILE...
copy() {
  mode=$1 folder=$2
  shift 2
  for file; do put "$mode" "$folder/${file##*/}" cat "$file"; done
}
# filled FILE [EXTRA PACKAGES]: prints a file with its @WORDS@ replaced.
filled() {
  sed -e "s|@PREFIX@|$PREFIX|" -e "s|@LIBDIR@|$LIBDIR|" -e "s|@INCLUDEDIR@|$include|" -e "s|@VERSION@|$VERSION|" \
    -e "s|@EXTRA@|$2|" -e "s|@NEEDS@|$3|" "$1"
}

copy 644 "$include" $HEADERS
copy 644 "$share/mlfab" "$BUILD/mlfab_sim.c"
copy 644 "$LIBDIR" "$BUILD/libmlfab.a" $EXTRAS
copy 755 "$LIBDIR" "$BUILD/libmlfab.so.$VERSION"
put link "$LIBDIR/libmlfab.so.${VERSION%%.*}" "libmlfab.so.$VERSION"
put link "$LIBDIR/libmlfab.so" "libmlfab.so.$VERSION"
for mpi in $MPIS; do copy 755 "$LIBDIR/mlfab/$mpi" "$BUILD/mpi/$mpi/libmlfab_mpi.so"; done
# The library of the first MPI has a plain name too.
[ -z "$MPIS" ] || put link "$LIBDIR/libmlfab_mpi.so" "mlfab/${MPIS%% *}/libmlfab_mpi.so"
copy 755 "$bin" $TOOLS
put 755 "$bin/mlfab-fetch" filled tools/mlfab-fetch
put 644 "$completions/mlfab-run" cat tools/mlfab.bash
for tool in $TOOLS tools/mlfab-fetch; do
  put 644 "$share/man/man1/${tool##*/}.1" "$PYTHON" tools/man.py "$tool" "$VERSION"
  [ "${tool##*/}" = mlfab-run ] || put link "$completions/${tool##*/}" mlfab-run
done
put 644 "$LIBDIR/pkgconfig/mlfab.pc" filled mlfab.pc.in
for file in $EXTRAS; do
  extra=$(basename "${file#*libmlfab_}" .a)
  case $extra in tls) needs='libssl libcrypto' ;; curl) needs=libcurl ;; *) needs='libcurl libcrypto' ;; esac
  put 644 "$LIBDIR/pkgconfig/mlfab_$extra.pc" filled packaging/extra.pc.in "$extra" "$needs"
done
put 644 "$cmake/mlfabConfigVersion.cmake" filled cmake/mlfabConfigVersion.cmake.in
copy 644 "$cmake" cmake/mlfabConfig.cmake
[ "$doing" = install ] || rm -rf "$DESTDIR$cmake" "$DESTDIR$LIBDIR/mlfab"
