"""Kinds of numbers, the operations of reductions, and how rows of numbers are combined and divided."""
