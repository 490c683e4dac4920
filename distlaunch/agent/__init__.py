"""Processes of one host: groups, output, signals, warm starts, the link to the controller."""
