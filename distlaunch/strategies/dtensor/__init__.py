"""The strategy `dtensor`."""
