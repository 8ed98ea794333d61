"""Saving variables and arrays to a file, and loading them."""
