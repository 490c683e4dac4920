"""Checks of a model and its labels before and during training."""
