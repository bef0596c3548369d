"""Passes over a captured graph; none changes a bit of a result."""
