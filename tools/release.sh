#!/bin/sh
# release.sh [REVISION] [FOLDER]: writes mlfab-VERSION.tar.gz of a revision (HEAD) into a folder (build/), and prints its
# SHA-256. The same revision gives the same bytes: files have the time of the commit, and the compressor stores none.
#
# It fails if the tarball's mlfab.c differs from its sources, or if CHANGELOG.md lacks the version.
set -eu
revision=${1:-HEAD}
folder=${2:-build}
cd "$(git rev-parse --show-toplevel)"
mkdir -p "$folder"
version=$(git show "$revision:mlfab.h" | sed -n 's/^.define MLFAB_VERSION "\(.*\)"/\1/p')
name=mlfab-$version

git show "$revision:CHANGELOG.md" | grep -q "^## $version" || {
  echo "release.sh: CHANGELOG.md has no section '## $version'" >&2
  exit 1
}
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
git -c tar.umask=0022 archive --format=tar --prefix="$name/" "$revision" >"$trial/$name.tar"
tar -C "$trial" -xf "$trial/$name.tar"
(cd "$trial/$name" && python3 amalgamate.py --check) || {
  echo "release.sh: mlfab.c of $revision is not current: run make amalgamate" >&2
  exit 1
}
gzip -n -9 <"$trial/$name.tar" >"$folder/$name.tar.gz"
(cd "$folder" && sha256sum "$name.tar.gz")
