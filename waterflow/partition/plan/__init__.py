"""Plans the memory and the time of a graph's node groups."""
