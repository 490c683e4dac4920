"""The strategies with replicas in lockstep: `one_device`, `mirrored`, `multi_worker_mirrored`."""
