"""Programs: captured steps lowered to instructions, bound to a job's tensors, cached, and replaced by eager steps."""
