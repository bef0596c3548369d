"""Memory: what torch's allocators are asked for."""
