"""The config of a run: its sections, their checks, reading and writing."""
