#!/bin/bash
#SBATCH --job-name=job
#SBATCH --output=/shared/runs/job/launcher.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
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

# Slurm signals this shell, and the shell the launcher, which stops with a checkpoint and exit code 4.
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
# Slurm queues a job again by itself, too
if [ "${SLURM_RESTART_COUNT:-0}" -gt 10 ]; then
  echo "distlaunch: not started again: engine.requeues is 10"
  finish 4
fi
# where the queue has started it earlier
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
command -v "$python" >/dev/null || fail "there is no Python at $python; it must be at the same path as where you submit"

{
module load cuda
} || fail 'this line of engine.setup failed: module load cuda'

code=4
if [ -z "$signalled" ]; then
  # with job control, since background jobs of a script ignore SIGINT otherwise
  set -m
  DISTLAUNCH_HELD_CODE=76 "$python" -P -m distlaunch train "$run" --resume &
  child=$!
  # one that came before there was anybody to hand it to
  [ -z "$signalled" ] || kill -TERM "$child"
  while signalled=; wait "$child"; code=$?; [ -n "$signalled" ]; do :; done
  child=
fi
# 76: another launcher holds the run, and will bring it to its end
held=
[ "$code" != 76 ] || { held=1; code=75; }

# after `scancel` and a failure the job is over
case "$code" in 4 | 75) again=1 ;; *) again= ;; esac
if [ -n "$again" ] && [ -z "$held" ] && [ -z "$ending" ] && \
    [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then
    echo "distlaunch: job $SLURM_JOB_ID is queued again, to resume ($((${SLURM_RESTART_COUNT:-0} + 1)) of 10)"
    # a cause outside the job takes its time to pass
    [ "$code" != 75 ] || echo $(($(date +%s) + 60)) > "$run/job.not_before"
    if scontrol requeue "$SLURM_JOB_ID"; then
      [ "$code" != 75 ] || scontrol update StartTime=now+60 JobId="$SLURM_JOB_ID"
      exit "$code"
    fi
  else
    echo "distlaunch: not queued again: engine.requeues is 10"
  fi
fi

finish "$code"
