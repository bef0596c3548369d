"""What is changed in a captured graph; no bit of a result is."""
