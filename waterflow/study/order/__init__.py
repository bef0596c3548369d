"""Order of a study's trials: policies, one a file, and the table of trials on which they decide."""

from waterflow.study.order.fifo import Fifo
from waterflow.study.order.policy import Policy, TrialProgress
from waterflow.study.order.promising import Promising
from waterflow.study.order.trial_order import TrialOrder, policy_of

__all__ = ["Fifo", "Policy", "Promising", "TrialOrder", "TrialProgress", "policy_of"]
