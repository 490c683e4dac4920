"""The kinds of data sources: examples by number, a pipeline, streams; each as global batches at any position."""
