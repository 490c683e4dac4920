#!/usr/bin/env bash
# A CI job that tests every config with `distlaunch validate` and then `distlaunch train --smoke` (a few steps, a restart
# from the checkpoint, validation, an export). Exits with 1 if a config fails, after all configs have been tested.
#
#   scripts/ci_smoke.sh [CONFIG ...]        default: all of configs/
#
# Environment:
#   ARTIFACTS   folder for the logs and run directories, to be kept as the job's artefacts; default: ci-smoke
#   TIMEOUT_S   limit for each of the two commands, in seconds; default: 300
#   DISTLAUNCH  the command, if `distlaunch` is not on PATH
set -euo pipefail

distlaunch=${DISTLAUNCH:-distlaunch}
artifacts=${ARTIFACTS:-ci-smoke}
timeout_s=${TIMEOUT_S:-300}

configs=("$@")
if [[ ${#configs[@]} -eq 0 ]]; then
  shopt -s nullglob
  configs=("$(dirname "$0")"/../configs/*.yaml)
fi
[[ ${#configs[@]} -gt 0 ]] || { echo "error: there are no configs to prove" >&2; exit 2; }
mkdir -p "$artifacts"

# Asks to stop when time is over; who has not stopped half a minute later is killed. With `--foreground` no process
# group of its own, so that Ctrl-C reaches the command; distlaunch ends all that it has started.
limited() {
  timeout --foreground --kill-after=30 "$timeout_s" "$@"
}

# Prints what happened; returns whether it was good.
prove() {
  local config=$1 folder=$2 code=0
  limited "$distlaunch" validate "$config" > "$folder/validate.log" 2>&1 || code=$?
  if [[ $code -ne 0 ]]; then
    echo "is not valid, see $folder/validate.log"
    return 1
  fi
  limited "$distlaunch" train "$config" --smoke --set "runs_dir=\"$folder/runs\"" > "$folder/train.log" 2>&1 || code=$?
  case $code in
    0) echo "proven by a smoke run" ;;
    124 | 137) echo "took longer than $timeout_s s, see $folder/train.log" && return 1 ;;
    *) echo "ended with exit code $code, see $folder/train.log" && return 1 ;;
  esac
}

failed=0
summary=()
for config in "${configs[@]}"; do
  name=$(basename "$config")
  name=${name%.*}
  # configs of different folders may have the same name
  folder=$artifacts/$name
  for ((number = 2; ; number++)); do
    mkdir "$folder" 2> /dev/null && break
    [[ -d $folder ]] || { echo "error: cannot make the folder $folder" >&2; exit 2; }
    folder=$artifacts/$name-$number
  done
  echo "$name: started"
  began=$SECONDS
  if result=$(prove "$config" "$folder"); then
    verdict="ok  "
  else
    verdict=FAIL
    failed=1
    # what a reader of the job's log wants to see first
    tail -n 30 "$folder"/*.log >&2
  fi
  summary+=("$verdict  $name ($((SECONDS - began)) s): $result")
done

printf '%s\n' "${summary[@]}" | tee "$artifacts/summary.txt"
exit "$failed"
