"""Launch plans: the command, environment and files of each task, as data."""
