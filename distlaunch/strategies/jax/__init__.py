"""The strategy `jax`."""
