"""Runs and their attempts: choosing, starting, restarting, stopping, submitting."""
