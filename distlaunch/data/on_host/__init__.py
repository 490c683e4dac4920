"""Data that a task on JAX reads as NumPy arrays, without TensorFlow."""
