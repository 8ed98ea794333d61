"""``mpistrat checkpoint``: what files of checkpoints hold, and the same arrays in other formats."""
