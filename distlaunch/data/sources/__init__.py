"""Kinds of data as splits: examples by number, pipelines, streams and PyDatasets."""
