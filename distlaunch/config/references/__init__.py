"""References of a config to functions, Keras names and files."""
