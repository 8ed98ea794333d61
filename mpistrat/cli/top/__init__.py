"""The command ``mpistrat top``."""
