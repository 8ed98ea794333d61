"""The flight record: what a rank does, in memory that outlives its process and that its node can read."""
