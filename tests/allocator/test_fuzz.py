"""Random runs with every byte checked, on the simulated device, on the CPU, and against an obvious oracle."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.allocator.oracle import GraphDevice, Unordered
from tests.allocator.shrink import CASES, load, save, shrink
from tests.native import Fault, FuzzSetup, StreamAllocator, fuzz_table, run_fuzz
from waterflow.errors import MemoryLimitError

MiB = 1 << 20
KINDS = ("simulated", "cpu")
MIXES = [(streams, threads) for streams in (2, 4, 8) for threads in (1, streams)]


def checked(table: np.ndarray, setup: FuzzSetup, seed: int) -> dict[str, int]:
    """Runs a table; a failure is shrunk, kept as a case, and told with its seed."""
    found = run_fuzz(table, setup)
    if found.error:
        repeats = 1 if setup.threads == 1 and setup.simulated else 5  # others do not fail every time
        few = shrink(table, lambda rows: any(run_fuzz(rows, setup).error for _ in range(repeats)), 300)
        path = save(f"seed-{seed}-streams-{setup.streams}-threads-{setup.threads}", few, setup, found.error)
        pytest.fail(f"seed {seed}: {found.error} (row {found.row}); {len(few)} rows are kept in {path}")
    assert found.checks > 0
    return {**found.tiers, "requests": found.requests, "operations": found.operations}


@pytest.mark.needs_time("random runs on real memory, with threads")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_random_operations(kind: str, full: bool) -> None:
    """Sizes log-uniform from 1 byte to 64 MB; 2 to 8 streams and threads; every tier serves at least 1 % of them."""
    seed = int(os.environ.get("WATERFLOW_FUZZ_SEED", "1"))
    rows = (1_000_000 if full else 36_000 if kind == "simulated" else 12_000) // len(MIXES) + 1
    sums: dict[str, int] = {}
    for streams, threads in MIXES:
        setup = FuzzSetup(
            simulated=kind == "simulated", streams=streams, threads=threads, seed=seed, stall_share=0.01, stall_us=200
        )
        print(f"{kind}, {streams} streams, {threads} threads, seed {seed}")
        for name, count in checked(fuzz_table(setup, rows, seed), setup, seed).items():
            sums[name] = sums.get(name, 0) + count
    requests, operations = sums.pop("requests"), sums.pop("operations")
    assert operations >= rows * len(MIXES)
    rare = {tier: count for tier, count in sums.items() if count < 0.01 * requests}
    assert not rare, f"of {requests} requests, fewer than 1 % ended in {rare}"


@pytest.mark.parametrize("path", sorted(CASES.glob("*.json")), ids=lambda path: path.stem)
def test_what_once_failed(path: Path) -> None:
    table, setup = load(path)
    found = run_fuzz(table, replace(setup, fault="none", check_every=1))
    assert not found.error


def test_equal_seeds_give_equal_runs() -> None:
    setup = FuzzSetup()
    table = fuzz_table(setup, 3000, 5)
    assert (table == fuzz_table(setup, 3000, 5)).all() and (table != fuzz_table(setup, 3000, 6)).any()
    assert run_fuzz(table, setup) == run_fuzz(table, setup)


def test_512_bytes_of_alignment() -> None:
    setup = FuzzSetup(alignment=512, check_every=101)
    checked(fuzz_table(setup, 5000, 3), setup, 3)


def test_small_sizes_are_checked_at_every_step() -> None:
    setup = FuzzSetup(streams=3, capacity=6 * MiB, check_every=1)
    checked(fuzz_table(setup, 4000, 9, largest=2 * MiB), setup, 9)


def run_on_oracle(table: np.ndarray, setup: FuzzSetup) -> int:
    """The table's operations, in Python, on the obvious device; returns how many requests were served."""
    device = GraphDevice(setup.capacity)
    allocator = StreamAllocator(device, limit=setup.capacity, fault=getattr(Fault, setup.fault))
    streams = [allocator.add_stream() for _ in range(setup.streams)]
    blocks: dict[int, tuple[int, int, list[int]]] = {}
    marks: dict[int, int] = {}
    served = 0
    for kind, number, at, value in table.tolist():
        stream = streams[at]
        if kind == 0 and number not in blocks:
            try:
                address = allocator.allocate(value, stream)
            except MemoryLimitError:
                continue
            for other, size, _ in blocks.values():
                assert address + value <= other or other + size <= address
            device.access(stream, address, value, True)
            blocks[number] = (address, value, [stream])
            served += 1
        elif kind == 1 and number in blocks:
            address, size, users = blocks.pop(number)
            for user in users:
                device.access(user, address, size, False)
            allocator.release(address)
        elif kind == 2 and number in blocks:
            address, size, users = blocks[number]
            if stream not in users and users:
                for user in users:
                    allocator.wait(stream, allocator.mark(user))
                allocator.use(address, stream)
                users.append(stream)
                device.access(stream, address, size, False)
        elif kind == 3 and number in blocks and stream in blocks[number][2] and len(blocks[number][2]) > 1:
            allocator.end_use(blocks[number][0], stream)
            blocks[number][2].remove(stream)
        elif kind == 4:
            marks[number] = allocator.mark(stream)
        elif kind == 5 and number in marks:
            allocator.wait(stream, marks[number])
        elif kind == 7:
            device.advance_stream(stream)
        elif kind == 8:
            allocator.trim()
        allocator.check()
    return served


@pytest.mark.parametrize("seed", range(3))
def test_against_the_oracle(seed: int) -> None:
    setup = FuzzSetup(streams=3 + seed, capacity=16 * MiB)
    table = fuzz_table(setup, 900, seed, largest=8 * MiB, renew=False)
    assert run_on_oracle(table, setup) > 200


@pytest.mark.parametrize("fault", ["dropped_wait", "no_rerecord", "free_under_allocator"])
def test_the_oracle_sees(fault: str) -> None:
    setup = FuzzSetup(streams=4, capacity=16 * MiB, fault=fault)
    table = fuzz_table(setup, 900, 1, largest=8 * MiB, renew=False)
    with pytest.raises(Unordered):
        run_on_oracle(table, setup)


def test_failing_tables_become_small() -> None:
    setup = FuzzSetup(fault="dropped_wait")
    table = fuzz_table(setup, 2000, 1)
    few = shrink(table, lambda rows: bool(run_fuzz(rows, setup).error))
    assert run_fuzz(few, setup).error and len(few) <= 12
    assert all(not run_fuzz(np.delete(few, i, 0), setup).error for i in range(len(few)))
