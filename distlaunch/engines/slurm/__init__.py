"""Slurm: tasks in an allocation (`allocation`), and jobs that wait for one (`script`, `queue`)."""
