"""What the ranks of a program settle together: whether a resolver is right about them, and the device of each."""
