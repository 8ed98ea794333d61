"""Memory that the ranks of a node share, and reductions where the arrays are."""
