"""Lanes that run the plans of many jobs: admission, barriers, programs."""
