# Installs a package of Debian that tests need, where that may be. The scripts beside this one set, and then source it:
#   name     of the program, as people write it       package  of Debian       tests  that need it
#   service  yes, if the package starts one       (chromium has none)
#   in_ci    the exit status of CI without it          here()   whether it is there
# Where nothing may be installed, it says what to do.
here && exit 0

give_up() {
    echo "$name is missing: $1" >&2
    echo "The $tests are skipped. To run them: sudo apt-get install --no-install-recommends $package" >&2
    [ "${CI:-}" = true ] && exit "$in_ci"
    exit 0
}

[ "$(id -u)" = 0 ] || give_up "installing it needs root."
command -v apt-get >/dev/null || give_up "there is no apt-get here."

# A policy of 101 keeps packages from starting their services, which would listen on all addresses.
policy=/usr/sbin/policy-rc.d
made_policy=
remove_policy() { [ -z "$made_policy" ] || rm -f "$policy" || :; }
# A shell that a signal ends does not do what it is to do at its exit, unless it exits by itself.
trap remove_policy EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
if [ ! -e "$policy" ]; then
    made_policy=yes
    { printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"; } 2>/dev/null \
        || [ "$service" = no ] || give_up "$policy, which keeps its service from starting, cannot be written."
fi

echo "Installing $package for the $tests ..." >&2
export DEBIAN_FRONTEND=noninteractive
# Where packages cannot be had, that is known soon.
get() { apt-get -o Acquire::http::Timeout=15 -o Acquire::Retries=0 -qq "$@" >&2; }
get update || give_up "apt-get update failed."
get install -y --no-install-recommends "$package" || give_up "apt-get install failed."
here || give_up "the package does not contain it."
