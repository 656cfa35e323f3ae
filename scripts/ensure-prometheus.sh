#!/bin/sh
# Makes sure that the tests of metrics and alert rules find Prometheus and promtool. They start a private Prometheus; the
# packaged service is neither needed nor started.
set -eu

name=Prometheus package=prometheus tests="tests of metrics and alert rules" service=yes in_ci=0
here() { command -v prometheus >/dev/null && command -v promtool >/dev/null; }
folder=${0%/*}
[ "$folder" != "$0" ] || folder=.
. "$folder/ensure.sh"
