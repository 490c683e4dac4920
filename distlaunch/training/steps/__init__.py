"""The training and evaluation steps."""
