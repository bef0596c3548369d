"""The product's zoo, under the name that benchmarks and tests import: ``SMALL`` models for tests, ``FULL`` ones to measure."""

from __future__ import annotations

from waterflow import zoo

FULL, SMALL, ZooModel = zoo.FULL, zoo.SMALL, zoo.ZooModel
