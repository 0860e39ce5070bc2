#!/bin/sh
# packages.sh PACKAGE...: installs the packages that are missing (apt, as root; no service is started). Otherwise it
# prints the command and ends with status 1.
missing=
for package in "$@"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || { echo "All packages are installed: $*"; exit 0; }
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "Packages are missing, and only root can install them, with apt:" >&2
  echo "  apt-get install -y --no-install-recommends$missing" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  trap 'rm -f $policy' EXIT
  printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy
fi
install() { apt-get install -y --no-install-recommends "$@" >/dev/null 2>&1; }
# shellcheck disable=SC2086
{ install $missing || { apt-get update >/dev/null && install $missing; }; } && { echo "Installed:$missing"; exit 0; }
# One by one, since not every system has all of them.
status=0
for package in $missing; do
  install "$package" || { echo "$package cannot be installed: the tests that need it are skipped"; status=1; }
done
exit $status
