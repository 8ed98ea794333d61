"""``mpistrat slurm``: commands for batch jobs."""
