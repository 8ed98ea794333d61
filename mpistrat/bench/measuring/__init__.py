"""What measurements share: timing, and the start of a job under several ranks."""
