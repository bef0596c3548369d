"""One file for each policy of the cluster, beside a small base."""

from __future__ import annotations

from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.fifo import Fifo

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Fifo,)}
