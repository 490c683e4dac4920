"""Checks of a whole config, beyond the types of its values."""
