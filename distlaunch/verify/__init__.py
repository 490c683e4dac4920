"""The trials of `distlaunch verify`."""
