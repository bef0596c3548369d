"""Options of the form NAME=VALUE, among them the parameters of the cluster's policies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from waterflow.cli.references import ConfigError, meant
from waterflow.cluster.policies import POLICIES, make_policy
from waterflow.cluster.policies.base import Policy
from waterflow.errors import ClusterError

_GIVEN = ("scaling",)  # policy parameters with their own option


class Loader(yaml.SafeLoader):
    """Reads ``1e-3`` as a number; YAML 1.1 requires ``1.0e-3``."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def pairs(given: Sequence[str] | None, option: str, known: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Return the names and values of an option's texts. Raises ConfigError, also for a name that is not in ``known``."""
    found = []
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"{option} {text!r}: write it as NAME=VALUE")
        if known is not None and name not in known:
            raise ConfigError(f"{option} knows no {name!r}{meant(name, known)}")
        found.append((name, value))
    return found


def parameters_of(policies: Sequence[str], given: Sequence[str] | None) -> dict[str, Any]:
    """Return the values that ``--set`` gives to parameters of any of the policies. Raises ConfigError."""
    known = {name: None for policy in policies for name in names_of(policy)}
    # As in a config: 3 is a number, true a flag.
    return {name: yaml.load(value, Loader) for name, value in pairs(given, "--set", list(known))}


def names_of(policy: str) -> list[str]:
    """Return the names of a policy's parameters, but for those with their own option."""
    return [name for name in inspect.signature(POLICIES[policy]).parameters if name not in _GIVEN]


def policy_of(name: str, parameters: Mapping[str, Any]) -> Policy:
    """Return a new policy with these parameters. Raises ConfigError."""
    try:
        return make_policy(name, parameters)
    except ClusterError as error:
        raise ConfigError(str(error)) from None
