"""Policies: who may run when, and where memory comes from."""
