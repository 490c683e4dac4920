"""Sends the values of runs to experiment trackers, from the events that runs write anyway."""
