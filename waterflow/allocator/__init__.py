"""Memory: devices, and what torch's allocators are asked for."""
