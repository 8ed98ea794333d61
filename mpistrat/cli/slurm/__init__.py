"""``mpistrat slurm``: what helps with batch jobs."""
