"""``mpistrat run``: start a Python program on this machine, one process per rank."""
