"""Batches on their way to a step."""
