"""Data: reads batches for jobs, alone or shared, and copies those that a step may change."""
