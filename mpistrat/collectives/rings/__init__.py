"""All-reduces on rings between nodes: plain, in segments, and on each rail."""
