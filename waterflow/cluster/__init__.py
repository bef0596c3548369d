"""Many devices: who runs where, and those who run it."""
