"""Memory that the ranks of a node share, and memory that is used again."""
