"""What the README and the docs show, and the benchmarks measure."""
