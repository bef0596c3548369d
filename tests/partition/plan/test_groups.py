"""Cutting a step into groups, and the plan that comes of it."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from waterflow._C import GroupPlan
from waterflow.partition.plan.liveness import OperationMemory
from waterflow.partition.plan.plan import Plan, cut, format_bytes, make_plan, opaque_plan

MiB = 1 << 20


@st.composite
def steps(draw: st.DrawFn) -> list[OperationMemory]:
    """Any operations at all, and often ones that look like a training step."""
    random = draw(st.randoms(use_true_random=False))
    count = draw(st.integers(1, 120))
    rising = random.randint(0, count)
    before, made = 0, []
    for at in range(count):
        after = max(0, before + random.randint(-30, 30) + (12 if at < rising else -12))
        peak = max(before, after) + random.choice([0, 0, 1, 50])
        made.append(OperationMemory(peak, after, random.randint(0, 1000)))
        before = after
    return made


def plan_of(memory: list[OperationMemory], groups: int, **options: Any) -> Plan:
    return make_plan("job", memory, persistent=100, batch=10, groups=groups, **options)


@given(memory=steps(), groups=st.integers(1, 64))
def test_groups_cover_all_operations_once(memory: list[OperationMemory], groups: int) -> None:
    ends = cut([m.peak for m in memory], [m.after for m in memory], [m.traffic for m in memory], groups)
    assert ends == sorted(set(ends)) and ends[0] > 0 and ends[-1] == len(memory)
    assert len(ends) <= groups + 2


@given(memory=steps(), groups=st.integers(1, 64))
def test_a_cut_at_the_peak(memory: list[OperationMemory], groups: int) -> None:
    """The group with the highest operation ends behind it: what follows only has less to come."""
    peaks = [m.peak for m in memory]
    top = peaks.index(max(peaks))
    ends = cut(peaks, [m.after for m in memory], [m.traffic for m in memory], groups)
    assert top + 1 in ends


@given(memory=steps(), groups=st.integers(1, 64), timed=st.booleans())
def test_heights_follow_one_another(memory: list[OperationMemory], groups: int, timed: bool) -> None:
    seconds = [m.traffic * 1e-5 for m in memory] if timed else None
    plan = plan_of(memory, groups, seconds=seconds)
    assert plan.operations == len(memory) and plan.measured == timed
    assert [g.index for g in plan.groups] == list(range(len(plan.groups)))
    assert plan.groups[0].before == 0 and plan.groups[-1].after == 0
    for one, other in zip(plan.groups, plan.groups[1:]):
        assert (other.begin, other.before) == (one.end, one.after)
    for group in plan.groups:
        own = memory[group.begin : group.end]
        assert own and group.peak == max(group.before, group.after, *(m.peak for m in own))
        assert group.index == len(plan.groups) - 1 or group.after == own[-1].after
        assert group.traffic == sum(m.traffic for m in own)
        assert group.kind == ("allocation" if group.after > group.before else "deallocation")
    assert plan.height == max(m.peak for m in memory)
    assert plan.peak == plan.height + 110
    if timed:
        assert plan.seconds == pytest.approx(sum(m.traffic for m in memory) * 1e-5)
    # Admission accepts exactly such heights.
    native = GroupPlan(
        ends=[g.end for g in plan.groups], peak=[g.peak for g in plan.groups], after=[g.after for g in plan.groups]
    )
    assert native.largest == plan.height


def test_a_mountain_is_cut_into_climbs_and_descents() -> None:
    heights = [*range(1, 101), *range(99, -1, -1)]
    memory = [OperationMemory(max(h, p), h, 10) for p, h in zip([0, *heights], heights)]
    plan = plan_of(memory, 16)
    kinds = [group.kind for group in plan.groups]
    assert kinds == sorted(kinds) and set(kinds) == {"allocation", "deallocation"}
    assert 14 <= len(plan.groups) <= 18
    sizes = [group.end - group.begin for group in plan.groups]
    assert max(sizes) <= 2 * min(sizes)


def test_groups_are_finer_where_heights_change_fast() -> None:
    heights = [*range(50), *[50] * 100, *range(50, -1, -1)]
    memory = [OperationMemory(h + 1, h, 10) for h in heights]
    plan = plan_of(memory, 20)
    flat = [g for g in plan.groups if g.begin >= 50 and g.end <= 150]
    steep = [g for g in plan.groups if g.end <= 50]
    assert max(g.end - g.begin for g in steep) < min((g.end - g.begin for g in flat), default=100)


def test_short_steps_have_few_groups() -> None:
    memory = [OperationMemory(1, 1, 1)] * 40
    assert len(plan_of(memory, 32).groups) <= 7
    assert len(plan_of(memory[:1], 32).groups) == 1
    assert cut([], [], [], 4) == []


def test_plans_are_frozen_and_plain() -> None:
    """Nothing but names and numbers: they can be kept, compared, and sent elsewhere."""
    plan = plan_of([OperationMemory(3, 2, 5), OperationMemory(4, 0, 5)] * 10, 4, seconds=[0.25] * 20)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.name = "other"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.groups[0].peak = 0  # type: ignore[misc]

    def walk(value: Any) -> None:
        assert isinstance(value, (str, int, float, bool, type(None))), type(value)
        assert not isinstance(value, torch.Tensor)

    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if field.name == "groups":
            assert isinstance(value, tuple)
            for group in value:
                for inner in dataclasses.fields(group):
                    walk(getattr(group, inner.name))
        else:
            walk(value)
    assert pickle.loads(pickle.dumps(plan)) == plan and hash(plan) == hash(pickle.loads(pickle.dumps(plan)))
    assert plan.renamed("other").name == "other" and plan.renamed("other").groups == plan.groups


def test_a_plan_can_be_read() -> None:
    plan = plan_of([OperationMemory(3 * MiB, 2 * MiB, 5), OperationMemory(4 * MiB, 0, 5)] * 10, 4)
    text = str(plan)
    lines = text.splitlines()
    assert "plan of job: 20 operations" in lines[0] and "predicted from the graph" in lines[0]
    assert "height 4.0 MiB" in lines[1] and "persistent 100 B" in lines[1]
    assert len(lines) == 3 + len(plan.groups)
    assert all(len(line) <= 110 for line in lines)
    timed = str(plan_of([OperationMemory(3, 2, 5)] * 20, 4, seconds=[0.0015] * 20))
    assert "measured in a profiled step" in timed and " ms" in timed


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (-2048, "-2.0 KiB"), (412 * MiB, "412.0 MiB"),
     (5 << 40, "5.0 TiB"), (5000 << 40, "5000.0 TiB")],
)  # fmt: skip
def test_bytes_as_people_read_them(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_opaque_plans() -> None:
    plan = opaque_plan("odd", 500, persistent=10, batch=2, seconds=0.5)
    assert (plan.height, plan.peak, plan.seconds, len(plan.groups)) == (500, 512, 0.5, 1)
    assert not opaque_plan("odd", 500, persistent=10, batch=2).measured
