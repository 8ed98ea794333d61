"""What any optimizer may do besides its own step, one option per file."""
