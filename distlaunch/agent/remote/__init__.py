"""The agent: a process on each host of a job. The controller starts it, and it ends when their connection ends."""
