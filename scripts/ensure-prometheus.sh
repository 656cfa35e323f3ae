#!/bin/sh
# Makes sure that the tests of metrics and alert rules find Prometheus and promtool. They start a private Prometheus; the
# packaged service is neither needed nor started. Where nothing may be installed, they are skipped.
set -eu

here() { command -v prometheus >/dev/null && command -v promtool >/dev/null; }
here && exit 0

give_up() {
    echo "Prometheus is missing: $1" >&2
    echo "The tests on it are skipped. To run them: sudo apt-get install --no-install-recommends prometheus" >&2
    exit 0
}

[ "$(id -u)" = 0 ] || give_up "installing it needs root."
command -v apt-get >/dev/null || give_up "there is no apt-get here."

# A policy of 101 keeps the package from starting its service, which would listen on all addresses.
policy=/usr/sbin/policy-rc.d
made_policy=
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    made_policy=yes
fi
remove_policy() { [ -z "$made_policy" ] || rm -f "$policy"; }
trap remove_policy EXIT

echo "Installing prometheus for the tests of metrics and alert rules ..." >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2 || give_up "apt-get update failed."
apt-get install -y -qq --no-install-recommends prometheus >&2 || give_up "apt-get install failed."
here || give_up "the package does not contain it."
