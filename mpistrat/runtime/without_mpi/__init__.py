"""What ranks tell each other where they cannot call MPI, through directories that they share."""
