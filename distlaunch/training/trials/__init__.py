"""Trials of `distlaunch verify`: short trainings whose every step is recorded."""
