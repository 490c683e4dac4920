"""The comparison of a run's first steps with Keras on one device, in a process beside training."""
