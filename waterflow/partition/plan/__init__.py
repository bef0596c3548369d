"""From a graph to the memory and the time of its node groups."""
