#!/bin/sh
# Makes sure that the tests of a journal in a database find PostgreSQL. They start private servers of their own from the
# package's files; the packaged service is neither needed nor started.
set -eu

name=PostgreSQL package=postgresql tests="tests on a real database" service=yes in_ci=1
here() {
    for initdb in /usr/lib/postgresql/*/bin/initdb; do
        [ ! -x "$initdb" ] || return 0
    done
    return 1
}
folder=${0%/*}
[ "$folder" != "$0" ] || folder=.
. "$folder/ensure.sh"
