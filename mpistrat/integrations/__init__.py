"""Ways for programs of other libraries to run on this one, each with an extra of its own."""
