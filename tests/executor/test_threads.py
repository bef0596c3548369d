"""The number of intra-op threads of a lane is its own, whatever the process has set."""

from __future__ import annotations

import threading

import pytest
import torch

from waterflow import _C
from waterflow.executor.engine import Engine


def in_fresh_thread(work):
    box = []
    thread = threading.Thread(target=lambda: box.append(work()))
    thread.start()
    thread.join()
    return box[0]


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_setting_a_fresh_thread_changes_it_and_no_other():
    def work():
        _C.set_threads_here(1)
        return torch.get_num_threads()

    assert in_fresh_thread(work) == 1
    assert torch.get_num_threads() == 3
    assert in_fresh_thread(torch.get_num_threads) == 3


@pytest.mark.parametrize("threads_per_lane", [1, 2])
def test_lanes_run_on_their_own_number(threads_per_lane):
    with Engine(memory="64MiB", lanes=2, threads_per_lane=threads_per_lane) as engine:
        job = engine.add_job("look")
        seen, _ = engine.run_eager(job, torch.get_num_threads, None)
    assert seen == threads_per_lane
    assert torch.get_num_threads() == 3
    assert in_fresh_thread(torch.get_num_threads) == 3
