"""Arrays of any library, the device of a rank, and what a GPU needs."""
