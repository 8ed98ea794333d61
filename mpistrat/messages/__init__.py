"""Two-sided messages between the coordinator, the workers and the parameter servers of a job."""
