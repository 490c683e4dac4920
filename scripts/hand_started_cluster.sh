#!/usr/bin/env bash
# Starts a job on several machines by hand. Run it once on every machine, with a different INDEX and otherwise the same
# arguments.
#
#   scripts/hand_started_cluster.sh INDEX HOST:PORT HOST:PORT ... -- CONFIG [options of `distlaunch train`]
#
# For example, with two machines:
#
#   on the first    scripts/hand_started_cluster.sh 0 10.0.0.1:2222 10.0.0.2:2222 -- configs/fashion_mnist.yaml
#   on the second   scripts/hand_started_cluster.sh 1 10.0.0.1:2222 10.0.0.2:2222 -- configs/fashion_mnist.yaml
#
# INDEX counts from 0 and selects this machine's address. Every machine must reach all the addresses.
# Task 0 is the chief: its run directory has the checkpoints, the exports and the run's events. Every other task has
# a separate run directory, NAME-worker-INDEX, with its logs. A shared file system is not needed.
#
# The order of starts does not matter: tasks wait for each other, up to the config's cluster.start_timeout_s. The number
# of workers is the number of addresses, whatever cluster.workers says. If one machine fails, the tasks on the others end
# with exit code 75 and name it; run the same commands again with --resume to continue from the last checkpoint.
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

# TensorFlow and distlaunch read the cluster from this variable: the addresses of all tasks, and this machine's task.
printf -v list '"%s",' "${addresses[@]}"
export TF_CONFIG="{\"cluster\": {\"worker\": [${list%,}]}, \"task\": {\"type\": \"worker\", \"index\": $index}}"
exec "${DISTLAUNCH:-distlaunch}" train "$@"
