"""Saving and leaving when the job is told to stop."""
