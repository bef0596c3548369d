"""What fits together, before anything is trained; under our own policy, and under those that it is compared with."""

from waterflow.planner.largest import LargestUnder, largest_batch_under
from waterflow.planner.policies.banker import Banker
from waterflow.planner.policies.base import Outcome, Policy
from waterflow.planner.policies.dynamic import Dynamic
from waterflow.planner.policies.waterwave import Waterwave
from waterflow.planner.policies.waterwave_s import WaterwaveS

__all__ = [
    "Banker",
    "Dynamic",
    "LargestUnder",
    "Outcome",
    "Policy",
    "Waterwave",
    "WaterwaveS",
    "largest_batch_under",
]
