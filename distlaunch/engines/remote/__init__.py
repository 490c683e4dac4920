"""Runs tasks on hosts through agents. Other modules define how agents are started."""
