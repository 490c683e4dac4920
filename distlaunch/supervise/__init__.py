"""Supervision of a run: facts, state, decisions, verdict."""
