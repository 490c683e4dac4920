"""Checkpoints: when they are saved, how they are written and read, and how their state reaches all processes.

| question | module |
|---|---|
| When is a checkpoint saved? | `policy`, `best` |
| How does training continue during a write? | `saver`, `throttle`; which process writes what: `writers` |
| Where are checkpoints, which are kept, and which are damaged? | `store` |
| What does a checkpoint contain? | `meta` (progress, config), `state_files` and `format` (arrays), `callback_state` |
| From which checkpoint does a run continue? | `restorer`; with other optimizer settings: `optimizer_changes` |
| How do other processes get the state? | `distribution` |
"""
