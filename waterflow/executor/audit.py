"""Audits: now and then a captured step is done eagerly, too, and each bit is compared.

The second line of defence behind what a capture refuses. One that finds a difference ends the captures of this code in the
process.
"""

from __future__ import annotations

import logging
import os
import platform
import random
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from waterflow import _C
from waterflow.errors import AuditError, CaptureError, InvalidJobError, JobCancelled
from waterflow.executor.audited import Audited, Code, Faulty, codes
from waterflow.executor.binding import bind
from waterflow.executor.both_ways import BothWays, Difference, ProvesNothing
from waterflow.executor.captured import CapturedStep
from waterflow.executor.engine import Engine
from waterflow.executor.memory_limit import free_memory
from waterflow.executor.variant import Variant
from waterflow.partition.plan import Plan, format_bytes
from waterflow.partition.surroundings import surrounding_autocast

logger = logging.getLogger("waterflow")

EARLIEST, LATEST = 2, 50  # a job's steps, between which the second audit of a captured step lies
RARE = 100, 500  # the same of a job's next one; of each one behind it ten times these
SMALL = 16 << 20  # bytes that any machine has
SHARE_OF_FREE = 0.5  # of the machine's memory, where no engine says how much there is
_DEFAULT = "first"
_OPERATORS = frozenset(
    {"aten", "prims", "quantized", "mkldnn", "torchvision", "torchaudio", "waterflow"}
)  # namespaces of libraries', and of our own


def how_often(audit: int | None) -> int | str:
    """What ``audit=`` asks for, or else the environment. Raises InvalidJobError for what that cannot be."""
    if audit is None:
        said = os.environ.get("WATERFLOW_AUDIT") or _DEFAULT
        if said not in ("all", "first", "off"):
            raise InvalidJobError(f"WATERFLOW_AUDIT must be 'all', 'first' or 'off'; got {said!r}")
        return said
    if isinstance(audit, bool) or not isinstance(audit, int) or audit < 1:
        raise InvalidJobError(f"audit must be a positive integer: every so many steps are audited; got {audit!r}")
    return audit


class Audit:
    """The audits of one job: which of its steps they look at, and which steps it took on trust.

    One thread at a time.
    """

    def __init__(self, audit: int | None, name: str, generator: torch.Generator | None, device: torch.device) -> None:
        self._how_often = how_often(audit) if device.type == "cpu" else "off"
        self._name = name
        self._generator = generator
        self._own: dict[int, Audited] = {}  # by number of the capture, where each job has audits of its own
        self._rare: dict[int, int] = {}  # by number of the capture, where the job's next one of its rare audits is due
        self._trusted: set[Code] = set()
        self.steps = self.passed = 0  # captured ones that were handed in; those that equal the eager ones
        self.seconds = 0.0  # that audits took

    def due(self, variant: Variant) -> bool:
        """Whether a step that is about to be handed in is to be audited first."""
        self.steps += 1
        if self._is_due(variant):
            return True
        self._trusted.add(variant.code)
        return False

    def _is_due(self, variant: Variant) -> bool:
        how_often = self._how_often
        if how_often == "off":
            return False
        if isinstance(how_often, int):
            return (self.steps - 1) % how_often == 0
        exact = variant.plain.exactly or variant.plain
        number = exact.capture.number
        if (rare := self._rare.get(number)) is None:
            rare = self._rare[number] = self._rarely()
        if rare <= self.steps:
            self._rare[number] = self._rarely()
            return True
        audited = exact.audited if how_often == "first" else self._own.setdefault(number, Audited())
        if audited.later < 0:
            return False
        if audited.begins():
            audited.later = self.steps - 1 + random.Random(self._seed()).randint(EARLIEST, LATEST)
            return True
        return audited.ends(self.steps)

    def _rarely(self) -> int:
        """The first step behind this one at which a captured step is audited, in however long a job."""
        first, last = RARE
        while (place := random.Random(self._seed() + first).randint(first, last)) <= self.steps:
            first, last = 10 * first, 10 * last
        return place

    def _seed(self) -> int:
        return torch.initial_seed() if self._generator is None else self._generator.initial_seed()

    def refused(self, error: CaptureError) -> CaptureError:
        """Why a step is to run eagerly. Raises AuditError where captured steps of faulty code were taken on trust."""
        if isinstance(error, Faulty) and error.code in self._trusted:
            raise AuditError(
                f"step {self._name!r} cannot go on: {error}. Steps before this one were not compared, so its state may be wrong, "
                "and there is none that is known to be right. Begin again: in this process the code now runs eagerly. "
                "Step(audit=1) or WATERFLOW_AUDIT=off say how much is compared"
            ) from None
        return error

    def look(
        self, variant: Variant, leaves: list[Any], batch: Any, sums: Mapping[str, torch.Tensor],
        engine: Engine | None, job: int | None, batches: int, keep: bool,
    ) -> tuple[_C.StepRun, bool] | None:  # fmt: skip
        """Do the job's next step both ways, while none is under way; the job holds so many ``batches`` at a time.

        Where the ways agree and it may ``keep`` the step, that stays done: returns its captured run, and whether that was
        profiled. Else the job's state is as it was. Raises Faulty where the ways differ, which ends the captures of this code.
        """
        start = time.perf_counter()
        ways = self._both_ways(variant, leaves, batch, sums, keep)
        try:
            found = _admitted(ways, engine, job, variant.planned.plan, batches)
        except ProvesNothing as error:
            if (why := str(error)) not in variant.code.told:
                variant.code.told.add(why)
                logger.info("step %r was not audited: %s", self._name, why)
            self._trusted.add(variant.code)
            return None
        finally:
            self.seconds += time.perf_counter() - start
        if found is None:
            self.passed += 1
            return None if ways.done is None else (ways.done, ways.profiled)
        if codes.end(variant.code, str(found)):
            logger.error(_report(self._name, variant, found))
        if found.lost:
            self._trusted.add(variant.code)
        raise Faulty(variant.code)

    def _both_ways(
        self, variant: Variant, leaves: list[Any], batch: Any, sums: Mapping[str, torch.Tensor], keep: bool
    ) -> BothWays:
        captured, binding, slots = variant.captured, variant.binding, variant.slots
        given = variant.given(leaves, None)
        exact = variant.plain.exactly or variant.plain
        if not captured.exact:
            captured = exact
            binding, slots, positions = bind(exact, variant.owner)
            binding.set_generator(self._generator)
            given, keep = [leaves[i] for i in positions], False
        surrounding = surrounding_autocast(variant.owner.spec.device.type)
        return BothWays(
            self._name, captured, binding, slots, given, variant.owner, sums, self._generator, batch, surrounding,
            keep, keep and variant.planned.wants_profile,
        )  # fmt: skip


def _admitted(ways: BothWays, engine: Engine | None, job: int | None, plan: Plan, batches: int) -> Difference | None:
    """What differs, found on a lane where there are any, once there is room. Raises ProvesNothing where there can be none."""
    if (operator := _users_operator(ways.captured)) is not None:
        raise ProvesNothing(f"it calls the operator {operator}, which might count its calls")
    if not _gradients_here():
        raise ProvesNothing("it is called inside of an operator, below autograd")
    if engine is None or job is None:
        if ways.bytes > SMALL and ways.bytes > SHARE_OF_FREE * free_memory():
            raise ProvesNothing(f"the machine has no {format_bytes(ways.bytes)} free for it")
        return ways.difference()
    with engine.looking(job):  # nobody claims anything meanwhile
        if not engine.has_room(job, plan.persistent + batches * plan.batch, ways.bytes):
            raise ProvesNothing(f"it takes {format_bytes(ways.bytes)} of memory, more than there is for it")
        try:
            return engine.run_audit(job, ways)
        except _C.Cancelled as error:
            raise JobCancelled(str(error)) from None
        except ValueError as error:
            raise ProvesNothing(str(error)) from None


def _users_operator(captured: CapturedStep) -> str | None:
    """An operator that no library has defined: what it keeps for itself would be changed by each way."""
    targets = {node.target for node in captured.capture.graph.nodes if node.op == "call_function"}
    names = [target.name() for target in targets if isinstance(target, torch._ops.OpOverload)]
    return min((name for name in names if name.partition("::")[0] not in _OPERATORS), default=None)


def _gradients_here() -> bool:
    """Whether autograd can record what the calling thread does."""
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def _report(name: str, variant: Variant, found: Difference) -> str:
    spec, captured = variant.owner.spec, variant.captured
    settings = {"accumulate": spec.accumulate, "clip_grad_norm": spec.clip_norm, "clip_grad_value": spec.clip_value,
                "autocast": spec.autocast, "early_updates": spec.early_updates}  # fmt: skip
    given = ", ".join(f"{name}={value}" for name, value in settings.items())
    held = zip(captured.capture.graph.nodes, captured.capture.inputs)  # placeholders come first
    forms = [node.meta["val"] for node, one in held if one.kind == "batch"]
    batch = [(*one.shape, one.stride(), str(one.dtype).removeprefix("torch.")) for one in forms]
    return (
        f"the audit of step {name!r} found that its captured form is not the eager one. The first difference is in {found}. "
        "This is a fault of waterflow. From now on steps of this code run eagerly in this process, in all of its jobs. "
        f"Please report it, if you can with the model, the step function and a batch, and with this: {type(spec.model).__name__} "
        f"of {captured.capture.nodes} operations, {type(spec.optimizer).__name__}, batch {batch}, {given}, "
        f"{torch.get_num_threads()} threads; waterflow {sys.modules['waterflow'].__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()} on {platform.machine()}"
    )
