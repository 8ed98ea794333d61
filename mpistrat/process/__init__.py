"""This process: its start of MPI, its files and children, its failure and its end."""
