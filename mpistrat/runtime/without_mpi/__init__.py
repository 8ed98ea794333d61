"""Messages between ranks that cannot call MPI, through directories that they share."""
