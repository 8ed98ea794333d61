"""The command ``mpistrat trace``."""
