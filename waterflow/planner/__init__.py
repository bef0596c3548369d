"""Predictions made before anything is trained: which jobs fit together, and with which batches."""
