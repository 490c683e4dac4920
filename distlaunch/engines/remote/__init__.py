"""Hosts with an agent on each, as an allocation. How agents are started is not known here."""
