"""Predicting with an export, without its run."""
