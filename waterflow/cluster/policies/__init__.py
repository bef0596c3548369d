"""The policies of the cluster: one file for each, beside a small base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waterflow.cluster.policies.antman import AntMan
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.capacity import Capacity
from waterflow.cluster.policies.elastic_tiresias import ElasticTiresias
from waterflow.cluster.policies.fifo import Fifo
from waterflow.cluster.policies.fifo_backfill import FifoBackfill
from waterflow.cluster.policies.gandiva import Gandiva
from waterflow.cluster.policies.gandiva_packing import GandivaPacking
from waterflow.cluster.policies.las import Las
from waterflow.cluster.policies.srsf import Srsf
from waterflow.cluster.policies.srtf import Srtf
from waterflow.errors import ClusterError

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Fifo, FifoBackfill, Srtf, Srsf, Las, ElasticTiresias, AntMan, Gandiva, GandivaPacking, Capacity)
}


def make_policy(name: str, parameters: Mapping[str, Any]) -> Policy:
    """Return a new policy with these arguments of its constructor. Raises ClusterError if it does not take them."""
    try:
        return POLICIES[name](**parameters)
    except (TypeError, ValueError) as error:
        raise ClusterError(f"policy {name!r} with {parameters}: {error}") from None
