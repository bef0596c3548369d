"""Policies that the planner is compared with, and the largest batch under any; the one part of benchmarks that looks inside."""

from benchmarks.baselines.largest import largest_batch_under
from benchmarks.baselines.policy import Banker, Dynamic, Policy
from benchmarks.baselines.waterwave import Waterwave, WaterwaveS

__all__ = ["Banker", "Dynamic", "Policy", "Waterwave", "WaterwaveS", "largest_batch_under"]
