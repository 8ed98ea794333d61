"""New process groups of torch: the agreement of their members, and their communicators."""
