"""The largest batch."""
from waterflow.executor.simulation import Simulated, SimulatedJob, simulate
from waterflow.planner.search import LargestBatch, LargestMix, largest_batch, largest_mix, run_copies
from waterflow.planner.sizes import SizedStep, StepSizes

__all__ = ["LargestBatch", "LargestMix", "SizedStep", "Simulated", "SimulatedJob", "StepSizes", "largest_batch",
           "largest_mix", "run_copies", "simulate"]
