"""Where rows come from: one source a file."""
