"""Copy the tensors and numbers of a job between two steps out of its objects, and put them back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from waterflow.errors import CheckpointError, InvalidJobError
from waterflow.executor.data.digest import digest, is_plain
from waterflow.executor.data.shared import SharedData
from waterflow.executor.program.eager import compose
from waterflow.job import Job
from waterflow.step import Step
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.shards.step import ShardedStep

logger = logging.getLogger("waterflow")

HOST = torch.device("cpu")
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_COUNTS = ("planned_requests", "missed_requests", "most_offloaded")


class JobState:
    """The state of a job's model, loss, optimizer and scheduler. Nothing may run on them while it is copied."""

    def __init__(self, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self._name = job.name
        self._holder, _ = compose(model, job.loss, job.step)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._placed: set[str] = set()  # tensors whose memory was moved out

    def take(self, move: bool = False, stays: bool = False) -> dict[str, Any]:
        """Return a copy of the state in host memory: tensors and plain data. With ``move`` the objects release their memory.

        Tensors that are moved out of host memory are not copied. Raises CheckpointError for a scheduler without a state_dict,
        and, unless only these objects will take it back (``stays``), if the optimizer trains tensors that are not the model's.
        """
        held = set(self._holder.parameters())
        updated = (p for group in self._optimizer.param_groups for p in group["params"])
        if not stays and (stranger := next((p for p in updated if p not in held), None)) is not None:
            raise CheckpointError(
                f"the optimizer of job {self._name!r} trains a tensor of shape {tuple(stranger.shape)} that is no parameter of "
                "the model, whose values a checkpoint would not have; make it one"
            )
        if self._scheduler is not None and not callable(getattr(self._scheduler, "state_dict", None)):
            raise CheckpointError(
                f"the scheduler of job {self._name!r}, a {type(self._scheduler).__name__}, has no state_dict, so no job "
                "could be resumed with it; give it the methods state_dict and load_state_dict, as torch's schedulers have"
            )
        tensors = dict(self._tensors())
        # Views of shared memory cannot be released one by one: they are copied and stay.
        alone = _alone(tensors) if move else set()
        taken = {
            "tensors": {name: _on_host(tensor, name not in alone) for name, tensor in tensors.items()},
            **self._flags(),
            "optimizer": copied(self._optimizer.state_dict(), not move),
            "optimizer_class": type(self._optimizer).__name__,
            "scheduler": copied(self._scheduler.state_dict()) if self._scheduler is not None else None,
        }
        if move:
            for name in alone:
                tensors[name].data = tensors[name].data.new_empty(0)
            self._placed = alone
            # It is often larger than the model; put() makes it anew.
            self._optimizer.state.clear()
        return taken

    def put(self, taken: dict[str, Any]) -> None:
        """Copy a taken state into the objects. They keep no reference to it.

        Raises CheckpointError if it is of another kind of model, optimizer or scheduler.
        """
        tensors = dict(self._tensors())
        self._check(tensors, taken)
        with torch.no_grad():
            for name, saved in taken["tensors"].items():
                if name in self._placed:
                    # Released tensors get memory of their own; others keep theirs, as users may hold views of it.
                    tensors[name].data = saved.to(tensors[name].device, copy=True)
                else:
                    tensors[name].copy_(saved)
        self._placed = set()
        self._put_flags(taken)
        self._put_optimizer(taken["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(copied(taken["scheduler"]))

    def _flags(self) -> dict[str, Any]:
        modules = dict(self._holder.named_modules())
        return {
            "extra": {name: copied(module.get_extra_state()) for name, module in modules.items() if _has_extra(module)},
            "evaluating": [name for name, module in modules.items() if not module.training],
            "frozen": [name for name, p in self._holder.named_parameters() if not p.requires_grad],
        }

    def _put_flags(self, taken: dict[str, Any]) -> None:
        for name, module in self._holder.named_modules():
            module.training = name not in taken["evaluating"]
            if name in taken["extra"]:
                module.set_extra_state(copied(taken["extra"][name]))
        for name, parameter in self._holder.named_parameters():
            parameter.requires_grad_(name not in taken["frozen"])

    # -- for other processes that train the same job

    def structure(self) -> list[str]:
        """Return names and shapes in the order of the model, and those that the optimizer trains in its order."""
        names = {id(parameter): name for name, parameter in self._holder.named_parameters()}
        kind = type(self._optimizer).__name__
        return [f"{name}, {_shown(tuple(tensor.shape), tensor.dtype)}" for name, tensor in self._tensors()] + [
            f"{names.get(id(p), f'a tensor of shape {list(p.shape)}')} in group {number} of {kind}"
            for number, group in enumerate(self._optimizer.param_groups)
            for p in group["params"]
        ]

    def digests(self) -> dict[str, Any]:
        """Return what tells two states apart, by names, causes first: settings, and digests of tensors."""
        flags, optimizer = self._flags(), self._optimizer
        names = {id(parameter): name for name, parameter in self._holder.named_parameters()}
        found: dict[str, Any] = {"frozen parameters": flags["frozen"], "parts in evaluation mode": flags["evaluating"]}
        found |= {f"get_extra_state of {name}": digest(extra) for name, extra in flags["extra"].items()}
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in sorted(group.items()) if key != "params"}
            found[f"group {number} of the optimizer"] = copied(settings)
        found |= {name: digest(tensor) for name, tensor in self._tensors()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=str):
                found[f"{key} of {names.get(id(parameter))}"] = digest(value)
        return found

    def attributes(self) -> dict[tuple[str, str], Any]:
        """Return what modules have as attributes beside their state, by module and name: plain data, and tensors that view no state."""
        state = {one.untyped_storage().data_ptr() for _, one in self._tensors() if one.layout == torch.strided}

        def counts(value: Any) -> bool:
            if type(value) is not torch.Tensor:
                return is_plain(value)
            return value.layout == torch.strided and not value.is_meta and value.untyped_storage().data_ptr() not in state

        return {
            (name, key): value
            for name, module in self._holder.named_modules()
            for key, value in vars(module).items()
            if key not in _OF_ALL_MODULES and counts(value)
        }

    def put_attributes(self, given: dict[tuple[str, str], Any]) -> None:
        """Set attributes that are others than in the objects."""
        own, modules = self.attributes(), dict(self._holder.named_modules())
        for (name, key), value in given.items():
            mine: Any = own.get((name, key))
            if name not in modules or digest(mine) == digest(value):
                continue
            tensors = isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor)
            if tensors and (mine.shape, mine.dtype) == (value.shape, value.dtype):
                with torch.no_grad():
                    mine.copy_(value)  # it may be a view of another one
            else:
                setattr(modules[name], key, value.to(mine.device) if tensors else value)

    def seen(self) -> dict[str, dict[Any, Any]]:
        """Return digests of the state and of attributes, for ``changes``."""
        attributes = {key: digest(value) for key, value in self.attributes().items()}
        return {"state": self.digests(), "attributes": attributes, "structure": dict(enumerate(self.structure()))}

    def changes(self, before: dict[str, dict[Any, Any]]) -> dict[str, Any] | None:
        """Return what has changed since ``seen`` returned ``before``, for ``put_changes``; None if nothing has.

        Raises InvalidJobError if parameters or buffers are other ones.
        """
        now = self.seen()
        if other := set(now["structure"].items()) ^ set(before["structure"].items()):
            raise InvalidJobError(
                f"evaluate= of job {self._name!r} has changed which parameters and buffers there are ({min(other)[1]}), and other devices "
                "still train the ones before. Let it change their values alone, or train without devices="
            )
        state, attributes = (
            {key for key, value in now[of].items() if digest(value) != digest(before[of].get(key))}
            for of in ("state", "attributes")
        )
        if not state and not attributes:
            return None
        tensors = dict(self._tensors())
        return {
            "tensors": {name: _on_host(tensor, False) for name, tensor in tensors.items() if name in state},
            **self._flags(),
            "optimizer": copied(self._optimizer.state_dict(), False) if state - tensors.keys() else None,
            "attributes": {key: copied(value) for key, value in self.attributes().items() if key in attributes},
        }

    def put_changes(self, changes: dict[str, Any]) -> None:
        """Put what ``changes`` of the same state returned into the objects."""
        tensors = dict(self._tensors())
        with torch.no_grad():
            for name, value in changes["tensors"].items():
                tensors[name].copy_(value)
        self._put_flags(changes)
        if changes["optimizer"] is not None:
            self._put_optimizer(changes["optimizer"], quiet=True)
        self.put_attributes(changes["attributes"])

    # -- inside

    def _put_optimizer(self, taken: dict[str, Any], quiet: bool = False) -> None:
        # A copy, as load_state_dict() keeps tensors of what it is given.
        optimizer, state = self._optimizer, copied(taken)
        mine = [dict(group) for group in optimizer.param_groups]
        try:
            optimizer.load_state_dict(state)
        except (ValueError, KeyError) as error:
            raise _other(self._name, f"its {type(optimizer).__name__} has other parameters: {error}") from None
        for before, now in zip(mine, optimizer.param_groups):  # a scheduler changes some of them
            own = {"initial_lr"} if self._scheduler is not None else before.keys() - {"params"}
            other = [f"{name}={now[name]}" for name in sorted(own & now.keys()) if now[name] != before[name]]
            if other and not quiet:
                told = "job %r goes on with %s, as its checkpoint has it, not with the settings that its optimizer was made with"
                logger.warning(told, self._name, ", ".join(other))
        # torch casts state to its parameter's type, which loses bits of state that is kept in another one.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters):
            for key, value in state["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and optimizer.state[parameter][key].dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(optimizer.state[parameter][key].device)

    def _check(self, tensors: dict[str, torch.Tensor], taken: dict[str, Any]) -> None:
        saved = taken["tensors"]
        if missing := sorted(saved.keys() ^ tensors.keys()):
            of = "model" if missing[0] in tensors else "checkpoint"
            raise _other(self._name, f"only the {of} has {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}")
        for name, tensor in tensors.items():
            if name in self._placed:
                continue
            mine, theirs = (tuple(tensor.shape), tensor.dtype), (tuple(saved[name].shape), saved[name].dtype)
            if mine != theirs:
                raise _other(self._name, f"{name} is {_shown(*mine)} in the model and {_shown(*theirs)} in the checkpoint")
        if (kind := type(self._optimizer).__name__) != taken["optimizer_class"]:
            raise _other(self._name, f"it trains with {kind}, the checkpoint was made with {taken['optimizer_class']}")
        if (self._scheduler is None) != (taken["scheduler"] is None):
            has = "no scheduler" if self._scheduler is None else "a scheduler"
            raise _other(self._name, f"it has {has}, unlike that of the checkpoint")

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._holder.named_parameters()
        yield from self._holder.named_buffers()


def progress_of(step: Step) -> dict[str, Any]:
    """Return a step's counters and its position within an update: calls, and gradient sums by parameter."""
    sums: dict[str, torch.Tensor] = {}
    if isinstance(step, ShardedStep):
        return {"counts": {name: getattr(step, name) for name in _COUNTS}, **copied(step.progress())}
    if step._micro and step.opaque_reason is None:
        sums = step._bound_steps.sums
    elif step._micro:
        sums = step._eager_step.named_sums()
    return {"calls": step._micro, "sums": copied(sums), "counts": {name: getattr(step, name) for name in _COUNTS}}


def put_progress(step: Step, taken: dict[str, Any]) -> None:
    """Set counters and position of a step that has not been called yet."""
    for name, count in taken["counts"].items():
        setattr(step, {"most_spilled": "most_offloaded"}.get(name, name), count)  # an earlier version's name
    if isinstance(step, ShardedStep):
        step.put_progress(copied(taken))
        return
    step._micro = taken["calls"]
    parameters = dict(step._spec.model.named_parameters())
    sums = {name: one.to(parameters[name].device, copy=True) for name, one in taken["sums"].items()}
    for parameter in parameters.values():
        parameter.grad = None
    if step.opaque_reason is None:
        step._bound_steps.put_sums(sums)
    else:
        step._eager_step.put_sums(sums)


def check_same_job(job: Job, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if ``job`` cannot resume from ``checkpoint``; its model is compared when it is made."""
    state = checkpoint.state
    told = None
    if job.name != checkpoint.job:
        told = f"it was made from {checkpoint.job!r}"
    elif job.seed is not None and int(job.seed) != state["seed"]:
        told = f"its seed is {job.seed}, the checkpoint's is {state['seed']}"
    elif isinstance(job.data, SharedData) != state["shared"]:
        told = f"its data is {'' if not state['shared'] else 'not '}shared with other jobs, unlike that of the checkpoint"
    elif job.epochs < checkpoint.epoch + (checkpoint.batch > 0):
        told = f"it has {job.epochs} epochs, the checkpoint is in epoch {checkpoint.epoch + 1}"
    if told is not None:
        raise _other(job.name, told)
    if not state["shared"] and state["data"] is None:
        raise CheckpointError(
            f"the checkpoint of job {job.name!r} was made of a suspended job whose data can be read only once, and only that job "
            "can go on from it. Pass a list, a DataLoader, a function that makes an iterator, or data with the methods "
            "state_dict and load_state_dict"
        )


def as_checkpoint_error(job: str, error: Exception) -> CheckpointError:
    """Return the error of a job that could not take its state back, as a CheckpointError."""
    return error if isinstance(error, CheckpointError) else _other(job, f"{type(error).__name__}: {error}")


def copied(value: Any, tensors: bool = True) -> Any:
    """Return a deep copy of plain data with its tensors in host memory.

    Without ``tensors``, tensors that are in host memory already are not copied.
    """
    if isinstance(value, torch.Tensor):
        return _on_host(value, tensors)
    if type(value) in (list, tuple):
        return type(value)(copied(entry, tensors) for entry in value)
    if type(value) is dict:
        return {key: copied(entry, tensors) for key, entry in value.items()}
    return copy.deepcopy(value)


def _other(name: str, how: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is of another job than {name!r}: {how}. Go on with the job that it was made from, or start this one anew"
    )


def _on_host(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    return tensor.detach().to(HOST, copy=copy) if copy or tensor.device != HOST else tensor.detach()


def _alone(tensors: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of tensors that fill a storage which no other of them uses."""
    # Only of these can the memory be released and allocated again without breaking a view, a tie, or a stride.
    users: dict[int, int] = {}
    for tensor in tensors.values():
        users[tensor.untyped_storage().data_ptr()] = users.get(tensor.untyped_storage().data_ptr(), 0) + 1
    return {
        name
        for name, tensor in tensors.items()
        if tensor.numel()
        and users[tensor.untyped_storage().data_ptr()] == 1
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    }


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _shown(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} of {str(dtype).removeprefix('torch.')}"
