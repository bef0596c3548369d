"""What fits together, before anything is trained."""
