#!/bin/sh
# Makes sure that the contract tests find RabbitMQ. They start private nodes of their own from the package's files; the
# packaged service is neither needed nor started.
set -eu

server=/usr/lib/rabbitmq/bin/rabbitmq-server
name="RabbitMQ ($server)" package=rabbitmq-server tests="tests on a real broker" service=yes in_ci=1
here() { [ -x "$server" ]; }
folder=${0%/*}
[ "$folder" != "$0" ] || folder=.
. "$folder/ensure.sh"
