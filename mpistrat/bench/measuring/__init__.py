"""What the subjects share: timing, memory, sizes, reports, and the start of a job."""
