"""The strategy `parameter_server`."""
