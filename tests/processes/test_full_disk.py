"""A disk that is really full: a small one of its own, which only the job sees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real import LIMIT_S, final_state, run
from supervised import REPOSITORY

from distlaunch.base.event_files import read_events
from distlaunch.base.events import CheckpointFailed, CheckpointSaved, RunEnded, StepsDone
from distlaunch.base.run_dir import RunDir
from distlaunch.runs.listing import summarize

MOUNT = ["unshare", "--map-root-user", "--mount"]
WHY = "needs unshare and user namespaces, to mount a small disk"
MINE = (Path(__file__).parent / "user_code" / "full_disk.py").read_text()
CONFIG = """\
name: job
model: {function: mine.py:model}
data: {function: mine.py:data, global_batch: 16}
compile: {optimizer: {name: SGD, args: {learning_rate: 0.001, momentum: 0.9}}, loss: mse}
train:
  epochs: 4
  steps_per_call: 1
  log_every_steps: 1
  callbacks: [{name: "mine.py:Fill", tasks: chief, args: {first: 12, last: LAST}}]
checkpoint: {every_steps: 5, keep: 3}
determinism: true
strategy: {kind: STRATEGY}
cluster: {workers: WORKERS}
"""
STEPS = 40
SCRIPT = """
mount -t tmpfs -o size=2m tmpfs runs || exit 9
"$@" train job.yaml
echo $? > code
cp -r runs full
rm -f runs/filler
"$@" train runs/job --resume
echo $? > code_of_resumed
cp -r runs resumed
"""


def _can_mount() -> bool:
    if shutil.which(MOUNT[0]) is None:
        return False
    probe = subprocess.run([*MOUNT, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, timeout=30)
    return probe.returncode == 0


pytestmark = pytest.mark.skipif(not _can_mount(), reason=WHY)


def on_a_small_disk(folder: Path, *, last: int, workers: int = 1) -> str:
    """Train on a small disk, make room, resume, and return the output."""
    (folder / "runs").mkdir()
    (folder / "mine.py").write_text(MINE)
    strategy = "multi_worker_mirrored" if workers > 1 else "one_device"
    text = CONFIG.replace("LAST", str(last)).replace("STRATEGY", strategy).replace("WORKERS", str(workers))
    (folder / "job.yaml").write_text(text)
    command = [*MOUNT, "sh", "-c", SCRIPT, "sh", sys.executable, "-m", "distlaunch"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": REPOSITORY}, capture_output=True,
                          text=True, timeout=2 * LIMIT_S)  # fmt: skip
    assert done.returncode != 9, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow  # in CI one that stays full
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_disk_that_is_full_for_a_while_fails_checkpoints_only(workers: int, tmp_path: Path) -> None:
    said = on_a_small_disk(tmp_path, last=28, workers=workers)
    assert "Traceback" not in said
    assert (tmp_path / "code").read_text() == "0\n", said
    events = read_events(RunDir(tmp_path / "full/job").events)
    failed = [event.step for event in events if isinstance(event, CheckpointFailed)]
    saved = {event.step for event in events if isinstance(event, CheckpointSaved)}
    assert failed[:3] == [15, 20, 20]
    # that of step 25 may be written still when there is room again
    assert (failed[3:], saved - {5, 10, 30, 35, 40}) in (([25], set()), ([], {25}))
    assert saved >= {5, 10, 30, 35, 40}
    told = [event for event in events if isinstance(event, StepsDone)]
    assert [event.step for event in told] == list(range(1, STEPS + 1)), "what was told meanwhile came later"
    assert isinstance(events[-1], RunEnded)


def test_a_disk_that_stays_full_fails_the_run_which_goes_on_when_there_is_room(tmp_path: Path) -> None:
    said = on_a_small_disk(tmp_path, last=0)
    code, _, err = run("train", "job.yaml", "--set", "train.callbacks=[]", "--set", "name=usual", cwd=tmp_path)
    assert code == 0, err
    assert (tmp_path / "code").read_text() == "3\n", said
    assert "the last checkpoint, of step 40, cannot be written: No space left on device" in said
    assert "Traceback" not in said
    # there was room left to say so
    full = summarize(RunDir(tmp_path / "full/job"))
    assert (full.status, full.step) == ("failed", STEPS)
    assert not list((tmp_path / "full/job").glob(".reserve"))
    assert (tmp_path / "code_of_resumed").read_text() == "0\n"
    assert "restored  step 10 " in said
    expected, got = (final_state(RunDir(tmp_path / path)) for path in ("runs/usual", "resumed/job"))
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
