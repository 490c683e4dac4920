"""Trials of `distlaunch verify` and `tune`: short trainings whose every step is recorded."""
