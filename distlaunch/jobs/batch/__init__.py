"""Jobs that wait in a scheduler's queue."""
