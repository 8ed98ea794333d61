"""The tasks of a Slurm step, from Slurm's environment."""
