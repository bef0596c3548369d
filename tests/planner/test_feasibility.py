"""The largest set of jobs that fits, against trying all of them."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, strategies as st

from waterflow.planner.feasibility import Need, feasible, largest_set, needed

needs = st.lists(st.builds(Need, st.just("a"), st.integers(0, 20), st.integers(0, 40)), max_size=8)


def fits(jobs: list[Need], memory: int) -> bool:
    return not jobs or sum(job.held for job in jobs) + max(job.height for job in jobs) <= memory


@given(needs, st.integers(0, 120))
def test_no_set_is_larger(jobs: list[Need], memory: int) -> None:
    found = largest_set(jobs, memory)
    assert fits([jobs[i] for i in found], memory) and list(found) == sorted(set(found))
    for more in combinations(jobs, len(found) + 1):
        assert not fits(list(more), memory)
    held = sum(jobs[i].held for i in found)
    assert all(sum(job.held for job in same) >= held for same in combinations(jobs, len(found)) if fits([*same], memory))


@given(needs, st.integers(0, 120))
def test_turns_have_every_job_that_fits_once(jobs: list[Need], memory: int) -> None:
    found = feasible(jobs, memory)
    turns = found.turns
    assert all(turn and fits([jobs[i] for i in turn], memory) for turn in turns)
    assert sorted(i for turn in turns for i in turn) == [i for i, job in enumerate(jobs) if job.peak <= memory]
    assert [len(turn) for turn in turns] == sorted((len(turn) for turn in turns), reverse=True)
    assert found.fits == fits(jobs, memory) == (needed(jobs) <= memory)
    assert needed(found.together) <= memory


def test_a_large_job_waits_for_many_small_ones() -> None:
    jobs = [Need("large", 10, 80), *(Need(f"small {i}", 5, 20) for i in range(10))]
    # The large one leaves room for two, without it all ten fit.
    assert largest_set(jobs, 100) == tuple(range(1, 11))
    assert feasible(jobs, 100).turns == (tuple(range(1, 11)), (0,))
