"""The contents of a run's files: facts from its events, its lock, errors of tasks, records."""
