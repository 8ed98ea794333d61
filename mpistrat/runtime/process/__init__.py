"""This process: its launcher, its MPI library, its failure and its exit."""
