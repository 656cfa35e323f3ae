#!/bin/sh
# Makes sure that the tests of the web page in a browser find Chromium. Where nothing may be installed, they are skipped.
set -eu

command -v chromium >/dev/null && exit 0

give_up() {
    echo "Chromium is missing: $1" >&2
    echo "The tests in a browser are skipped. To run them: sudo apt-get install --no-install-recommends chromium" >&2
    exit 0
}

[ "$(id -u)" = 0 ] || give_up "installing it needs root."
command -v apt-get >/dev/null || give_up "there is no apt-get here."

echo "Installing chromium for the tests in a browser ..." >&2
export DEBIAN_FRONTEND=noninteractive
# Where packages cannot be had, that is known soon.
get() { apt-get -o Acquire::http::Timeout=15 -o Acquire::Retries=0 -qq "$@" >&2; }
get update || give_up "apt-get update failed."
get install -y --no-install-recommends chromium || give_up "apt-get install failed."
command -v chromium >/dev/null || give_up "the package does not contain it."
