"""Explanations of failures for users."""
