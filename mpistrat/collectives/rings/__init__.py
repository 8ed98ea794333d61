"""Rings between nodes: plain, in segments, and one for each rail."""
