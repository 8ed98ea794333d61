"""This process: its launch, its MPI library, its failure and its end."""
