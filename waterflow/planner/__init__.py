"""What fits together, before anything is trained: the largest batches, and the largest sets."""
