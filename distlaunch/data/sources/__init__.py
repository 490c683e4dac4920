"""The ways to give data: examples by number, a pipeline, streams; each as global batches at any position."""
