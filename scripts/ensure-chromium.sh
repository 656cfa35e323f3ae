#!/bin/sh
# Makes sure that the tests of the web page in a browser find Chromium.
set -eu

name=Chromium package=chromium tests="tests in a browser" in_ci=0
here() { command -v chromium >/dev/null; }
. "${0%/*}/ensure.sh"
