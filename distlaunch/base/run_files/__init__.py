"""What is in the files of a run: facts from its events, its lock, errors of tasks, records."""
