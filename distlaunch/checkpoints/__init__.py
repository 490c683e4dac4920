"""Checkpoints: when they are saved, how they are written and read, and how their state reaches all processes.

| question | module |
|---|---|
| When is one saved? | `policy`, `best` |
| How does training continue while one is written? | `saver`, `throttle`; who writes what: `writers` |
| Where does it lie, which are kept, and which is damaged? | `store` |
| What is in it? | `meta` (progress, config), `state_files` and `format` (arrays), `callback_state` |
| Which one does a run continue from? | `restorer`; with other optimizer settings: `optimizer_changes` |
| How do other processes get the state? | `distribution` |
"""
