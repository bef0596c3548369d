"""From a step to its plan: capture, liveness, node groups."""
