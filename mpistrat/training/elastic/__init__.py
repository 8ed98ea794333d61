"""Copies of the state of a program in the memory of each node, for the run after the loss of a rank."""
