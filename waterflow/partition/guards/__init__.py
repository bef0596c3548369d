"""Guards: when a capture may be used again."""
