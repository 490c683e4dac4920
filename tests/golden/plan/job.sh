#!/bin/bash
#SBATCH --job-name=job
#SBATCH --output=/shared/runs/job/launcher.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --signal=B:USR1@120
#SBATCH --partition=gpu
#SBATCH --time=12:00:00
#SBATCH --requeue
# Written by `distlaunch submit`. To submit the run again: distlaunch submit RUN --resume
run=/shared/runs/job
python=/opt/venv/bin/python

finish() {
  echo "$1" > "$run/job.exit" 2>/dev/null
  exit "$1"
}
fail() {
  echo "distlaunch: $(hostname): $1" >&2
  finish 2
}

# Slurm signals this shell, which signals the launcher. The launcher stops with a checkpoint and exit code 4.
# USR1: the time limit is near; TERM: preempted, or cancelled; USR2: `distlaunch stop`; INT: `distlaunch stop --now`
ending= child= signalled=
stop() {
  signalled=1
  case "$1" in USR2 | INT) ending=1 ;; esac
  [ -n "$child" ] || return
  if [ "$1" = INT ]; then
    kill -INT "$child"
    sleep 0.6
    kill -INT "$child"
  else
    kill -TERM "$child"
  fi 2>/dev/null
}
for name in USR1 USR2 TERM INT; do trap "stop $name" "$name"; done

rm -f "$run/job.exit"
# Slurm may also requeue a job itself
if [ "${SLURM_RESTART_COUNT:-0}" -gt 10 ]; then
  echo "distlaunch: not restarted: engine.requeues is 10"
  finish 4
fi
# wait if Slurm has started the job before the requested time
if [ -f "$run/job.not_before" ]; then
  until=$(cat "$run/job.not_before") && rm -f "$run/job.not_before"
  while [ -z "$signalled" ] && [ "$(date +%s)" -lt "${until:-0}" ]; do
    sleep 1 &
    wait "$!"
  done
fi
unset TF_CONFIG
cd /home/me/project || fail 'the working directory is not here; it must be on a disk that the nodes share'
[ -f "$run/job.sh" ] || fail "$run is not here; runs_dir must be on a disk that the nodes share"
command -v "$python" >/dev/null || fail "there is no Python at $python, its path on the submitting machine"

{
module load cuda
} || fail 'this line of engine.setup failed: module load cuda'

code=4
if [ -z "$signalled" ]; then
  # turn on job control: without it, background jobs of a script ignore SIGINT
  set -m
  DISTLAUNCH_HELD_CODE=76 "$python" -P -m distlaunch train "$run" --resume &
  child=$!
  # pass on a signal that came before the launcher was started
  [ -z "$signalled" ] || kill -TERM "$child"
  while signalled=; wait "$child"; code=$?; [ -n "$signalled" ]; do :; done
  child=
fi
# 76: another launcher works on the run and will finish it
held=
[ "$code" != 76 ] || { held=1; code=75; }

# Slurm's controller may be busy or just be restarting
insist() {
  for pause in 1 2 4 8 15 30 ""; do
    "$@" && return
    [ -z "$ending" ] || return 1
    [ -z "$pause" ] || sleep "$pause"
  done
  return 1
}
find_state() {
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) && [ -n "$state" ]
}

# do not requeue the job after `scancel` or a failure
case "$code" in 4 | 75) requeue=1 ;; *) requeue= ;; esac
if [ -n "$requeue" ] && [ -z "$held" ] && [ -z "$ending" ]; then
  state= why=
  if ! insist find_state; then
    why="squeue does not report the state of job $SLURM_JOB_ID; to resume: distlaunch submit $run --resume"
  elif [ "$state" != RUNNING ] || [ -n "$ending" ]; then
    :
  elif [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then
    echo "distlaunch: requeueing job $SLURM_JOB_ID to resume ($((${SLURM_RESTART_COUNT:-0} + 1)) of 10)"
    # wait after a temporary failure, whose cause may take some time to disappear
    [ "$code" != 75 ] || echo $(($(date +%s) + 60)) > "$run/job.not_before"
    if insist scontrol requeue "$SLURM_JOB_ID"; then
      [ "$code" != 75 ] || scontrol update StartTime=now+60 JobId="$SLURM_JOB_ID"
      exit "$code"
    fi
    rm -f "$run/job.not_before"
    why="scontrol requeue failed; to resume: distlaunch submit $run --resume"
  else
    why="engine.requeues is 10"
  fi
  [ -z "$why" ] || echo "distlaunch: not requeued: $why"
fi

finish "$code"
