"""The common parts of `dtensor` and `jax`."""
