"""When a capture may be used again."""
