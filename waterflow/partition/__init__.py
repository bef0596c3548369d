"""Turns a training step into one graph, and the graph into a plan."""
