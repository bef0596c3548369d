"""Each kind of guard is switched off in turn: then a captured step is wrong, and an audit finds that. With the guard it is equal."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tests import planted_programs as planted
from tests.planted_programs import Program, eager_and_step
from tests.support import assert_same, same_bits, train_eager, train_step
from waterflow import _C, StepError, step
from waterflow.executor.program import binding, bound_step
from waterflow.executor.program.capture_cache import captures, codes
from waterflow.partition.capture.trace import Capture
from waterflow.partition.guards.observer import Kind
from waterflow.partition.guards.purity import ClosedWorld

Switch = Callable[[pytest.MonkeyPatch], None]
KEY_PARTS = ("model", "compute", "optimizer", "process", "step itself")


@pytest.fixture(autouse=True)
def _no_audits(monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    no_audits(monkeypatch)


def no_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """But those that are asked for; what another test found faulty is not known."""
    monkeypatch.setenv("WATERFLOW_AUDIT", "off")
    monkeypatch.setattr(codes, "_codes", weakref.WeakValueDictionary())


def _guard(kind: str) -> Switch:
    return lambda monkeypatch: monkeypatch.setattr(_C.Guards, kind, lambda self, *place: None)


def _forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C.Binding, "watch_form", lambda self, tensor: None)


def _entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_guard_entries", lambda guards, captured: None)
    monkeypatch.setattr(Capture, "holds", lambda self: True)


def _batch(monkeypatch: pytest.MonkeyPatch) -> None:
    flatten = step.flatten
    monkeypatch.setattr(step, "flatten", lambda *given: (*flatten(*given)[:2], "a batch"))
    monkeypatch.setattr(bound_step, "with_values", lambda known, places, leaves: (*known, (places, ())) if places else known)


def _part(name: str) -> Switch:
    place = KEY_PARTS.index(name)

    def switch(monkeypatch: pytest.MonkeyPatch) -> None:
        whole = bound_step.structure_key

        def without(spec: Any) -> Any:
            key, looked = whole(spec)
            assert isinstance(key, tuple)
            return (*key[:place], name, *key[place + 1 :]), looked

        monkeypatch.setattr(bound_step, "structure_key", without)

    return switch


def _rule(kind: str) -> Switch:
    def switch(monkeypatch: pytest.MonkeyPatch) -> None:
        rules = ClosedWorld._make_rules
        monkeypatch.setattr(ClosedWorld, "_make_rules", lambda self: {**rules(self), Kind[kind]: lambda operands: None})

    return switch


TABLE: dict[str, tuple[Program, Switch]] = {
    **{f"guard of {kind}": (program, _guard(kind)) for kind, program in planted.guarded().items()},
    "form of a tensor": (planted.of_forms(), _forms),
    "entry of a module": (planted.by_name(), _entries),
    "entry of a class": (planted.of_class(), _entries),
    **{f"key of a batch: {what}": (program, _batch) for what, program in planted.of_batch().items()},
    **{f"key of the {part}": (program, _part(part)) for part, program in planted.of_key().items()},
}
JUDGED = planted.judged()


@pytest.mark.parametrize("kind", TABLE)
def test_what_a_guard_would_miss_an_audit_finds(kind: str, monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    program, switch = TABLE[kind]
    eager, guarded = eager_and_step(program)
    assert_same(guarded, eager)
    _is_missed_and_found(program, switch, monkeypatch, no_captures)


@pytest.mark.parametrize("kind", JUDGED)
def test_what_the_judge_would_let_pass_an_audit_finds(kind: str, monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    program = JUDGED[kind]
    eager, judged = eager_and_step(program)
    assert_same(judged, eager)
    assert judged.step is not None and judged.step.opaque_reason is not None
    _is_missed_and_found(program, _rule(kind), monkeypatch, no_captures)


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)])
def test_what_the_guard_of_truth_would_miss_fails(
    before: float, after: float, monkeypatch: pytest.MonkeyPatch, no_captures: Any
) -> None:
    """The optimizer's operator refuses momentum without buffers, and buffers without momentum: nothing is wrong in silence."""
    program = planted.of_momentum(before, after)
    eager, guarded = eager_and_step(program)
    assert_same(guarded, eager)
    _guard("truth")(monkeypatch)
    no_captures.clear()
    with pytest.raises(StepError, match="momentum_buffer_list"):
        program.run(train_step)


def test_what_the_key_would_miss_of_a_steps_own_settings_an_audit_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    program, clip = Program(), {"clip_grad_norm": 0.01}
    program.run(train_step)  # without clipping
    eager = program.run(train_eager, **clip)
    assert_same(program.run(train_step, **clip), eager)
    _part("step itself")(monkeypatch)
    captures.clear()
    program.run(train_step)
    missed = program.run(train_step, **clip).tensors()
    assert not all(same_bits(missed[name], tensor) for name, tensor in eager.tensors().items())
    found = program.run(train_step, audit=1, **clip)
    assert found.step is not None and found.step.audit.passed == 0
    assert "the captured step is not the eager one" in str(found.step.opaque_reason)
    assert_same(found, eager)


def _is_missed_and_found(program: Program, switch: Switch, monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    switch(monkeypatch)
    no_captures.clear()
    eager, missed = eager_and_step(program)
    assert missed.step is not None and missed.step.opaque_reason is None
    mine, theirs = missed.tensors(), eager.tensors()
    assert mine.keys() != theirs.keys() or not all(same_bits(mine[name], theirs[name]) for name in mine)
    no_captures.clear()
    found = program.run(train_step, audit=1)
    assert found.step is not None
    assert "the captured step is not the eager one" in str(found.step.opaque_reason)
    assert found.step.audit.passed == planted.CHANGED_BEFORE
    assert_same(found, program.run(train_eager))
