"""What the subjects time: small programs, with the library and, as their bound, with MPI or files alone."""
