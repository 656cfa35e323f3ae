#!/bin/sh
# Makes sure that the tests of the web page in a browser find Chromium.
set -eu

name=Chromium package=chromium tests="tests in a browser" service=no in_ci=0
here() { command -v chromium >/dev/null; }
folder=${0%/*}
[ "$folder" != "$0" ] || folder=.
. "$folder/ensure.sh"
