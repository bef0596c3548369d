"""Captures a training step as one graph."""
