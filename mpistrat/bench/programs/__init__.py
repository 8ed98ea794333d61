"""The small programs that the subjects time: with the library, and with MPI or files alone as a bound."""
