"""Writes of functions that count once: kept while the function runs, prepared, and applied by all servers or none."""
