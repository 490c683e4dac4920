"""Plain Python that controller and tasks share: errors, events, the run directory, heartbeats, signals."""
