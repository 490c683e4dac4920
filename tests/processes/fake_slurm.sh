#!/bin/sh
# sbatch, squeue, scancel and scontrol, by the name it is called by. A job is a file in $FAKE_SLURM that holds its state.
# A call fails if $FAKE_SLURM.busy begins with a line that has its name, which is then removed.
for last; do :; done
if [ "$(head -n 1 "$FAKE_SLURM.busy" 2>/dev/null)" = "$(basename "$0")" ]; then
  sed -i 1d "$FAKE_SLURM.busy"
  echo "$(basename "$0"): error: Unable to contact slurm controller" >&2
  exit 1
fi
case "$(basename "$0")" in
sbatch)
  if grep -q partition=nowhere "$last"; then
    echo "sbatch: error: invalid partition specified: nowhere" >&2
    exit 1
  fi
  number=$(($(ls "$FAKE_SLURM" | wc -l) + 1))
  echo PENDING >"$FAKE_SLURM/$number"
  echo $number
  ;;
squeue)
  format='%T'
  for word; do
    case "$word" in
    --jobs=*) jobs=$(echo "${word#*=}" | tr , ' ') ;;
    --format=*) format=${word#*=} ;;
    esac
  done
  for job in $jobs; do
    [ -f "$FAKE_SLURM/$job" ] || continue
    [ "$format" = %T ] && cat "$FAKE_SLURM/$job" || echo "$job|$(cat "$FAKE_SLURM/$job")|Priority"
  done
  ;;
scancel) echo CANCELLED >"$FAKE_SLURM/$last" ;;
scontrol) echo PENDING >"$FAKE_SLURM/$last" ;;
esac
