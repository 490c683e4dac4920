#!/usr/bin/env bash
# Several machines by hand: run this once on every machine, each with its own INDEX and otherwise the same words.
#
#   scripts/hand_started_cluster.sh INDEX HOST:PORT HOST:PORT ... -- CONFIG [options of `distlaunch train`]
#
# For example, with two machines:
#
#   on the first    scripts/hand_started_cluster.sh 0 10.0.0.1:2222 10.0.0.2:2222 -- configs/fashion_mnist.yaml
#   on the second   scripts/hand_started_cluster.sh 1 10.0.0.1:2222 10.0.0.2:2222 -- configs/fashion_mnist.yaml
#
# INDEX counts from 0 and says which of the addresses is this machine's. Every machine must reach all the addresses.
# Task 0 is the chief: its run directory has the checkpoints, the exports and the run's events. Every other task has
# a run directory of its own, NAME-worker-INDEX, with its logs; a shared file system is fine, but none is needed.
#
# The order does not matter: who comes first waits for the others, up to the config's cluster.start_timeout_s.
# The number of workers is that of the addresses, whatever cluster.workers says. If one machine fails, the others
# end with exit code 75 and say so; run the same lines again with --resume to go on from the last checkpoint.
#
# DISTLAUNCH names the command if `distlaunch` is not on PATH.
set -euo pipefail

usage() {
  echo "error: $1" >&2
  echo "usage: ${0##*/} INDEX HOST:PORT HOST:PORT ... -- CONFIG [options of distlaunch train]" >&2
  exit 2
}

[[ $# -gt 0 && $1 =~ ^[0-9]+$ ]] || usage "expected INDEX, a number from 0; received '${1-}'"
index=$((10#$1))
shift

addresses=()
while [[ $# -gt 0 && $1 != -- ]]; do
  [[ $1 =~ ^[^[:space:]\"\\]+:[0-9]+$ ]] || usage "expected HOST:PORT; received '$1'"
  addresses+=("$1")
  shift
done
[[ $# -gt 0 ]] || usage "expected -- between the addresses and the config"
shift
[[ $# -gt 0 ]] || usage "expected a config after --"
((index < ${#addresses[@]})) || usage "INDEX is $index, but there are ${#addresses[@]} addresses, counted from 0"

# All that TensorFlow, and distlaunch with it, knows about a cluster: who takes part, and who of them is this machine.
printf -v list '"%s",' "${addresses[@]}"
export TF_CONFIG="{\"cluster\": {\"worker\": [${list%,}]}, \"task\": {\"type\": \"worker\", \"index\": $index}}"
exec "${DISTLAUNCH:-distlaunch}" train "$@"
