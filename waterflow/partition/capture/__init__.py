"""From a training step to one graph."""
