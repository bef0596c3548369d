"""A captured step as a program, bound to a job's tensors."""
