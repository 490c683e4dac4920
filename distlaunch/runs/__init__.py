"""Readers of run directories."""
