"""Reference models and datasets."""
