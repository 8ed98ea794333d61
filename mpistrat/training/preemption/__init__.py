"""Saving a checkpoint and ending the program when the job is told to stop."""
