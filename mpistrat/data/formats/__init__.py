"""Formats of files: how one file is described, and how its rows are read; one file per format."""
