"""All-reduces on rings between nodes: in segments, and on each rail."""
