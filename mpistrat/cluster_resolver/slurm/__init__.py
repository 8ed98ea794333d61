"""The resolver for the tasks of a Slurm step, and readers of Slurm's variables."""
