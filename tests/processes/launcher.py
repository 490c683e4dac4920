"""A launcher process of its own, to be signalled: `launcher.py RUN_DIR STOP_TIMEOUT TASK-ACTIONS [-- TASK-ACTIONS]`."""

import itertools
import json
import sys
from pathlib import Path

from supervised import Recorder, make_plan, supervise

if __name__ == "__main__":
    run_dir, stop_timeout_s, *rest = sys.argv[1:]
    groups = [list(group) for is_split, group in itertools.groupby(rest, lambda word: word == "--") if not is_split]
    recorder = Recorder()
    plan = make_plan(Path(run_dir), *groups, stop_timeout_s=float(stop_timeout_s))
    outcome = supervise(plan, recorder)
    print(json.dumps({"status": outcome.status, "notes": recorder.notes}))
    sys.exit(outcome.exit_code)
