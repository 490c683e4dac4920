"""The views that follow a running command."""
