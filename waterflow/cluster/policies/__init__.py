"""The policies of the cluster: one file for each, beside a small base."""

from __future__ import annotations

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

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Fifo, FifoBackfill, Srtf, Srsf, Las, ElasticTiresias, AntMan, Gandiva, GandivaPacking, Capacity)
}
