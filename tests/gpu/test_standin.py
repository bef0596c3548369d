"""The stand-in for a GPU: it is late, it refuses what the driver refuses, and it shows the faults that are planted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.gpu import standin

pytestmark = [
    pytest.mark.skipif("STANDIN_SCHEDULE" not in os.environ, reason="is about the stand-in"),
    pytest.mark.skipif(os.environ.get("STANDIN_SCHEDULE") != "late", reason="takes the stand-in as late as it can be"),
]


@pytest.fixture(autouse=True)
def _its_stream() -> Iterator[None]:
    """A ``torch.cuda.graph`` whose capture fails leaves its stream to the thread, and so to the tests behind these."""
    before = torch.cuda.current_stream()
    yield
    torch.cuda.set_stream(before)


def test_work_is_done_when_somebody_waits_for_it() -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    source = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        source.add_(1)
    with torch.cuda.stream(other):
        early = source.clone()
        other.wait_stream(one)
        late = source.clone()
    other.synchronize()
    assert early.sum().item() == 0 and late.sum().item() == 8


def test_whoever_asks_again_sees_the_work_done() -> None:
    event = torch.cuda.Event()
    torch.ones(8, device="cuda").add_(1)
    event.record()
    asked = [event.query() for _ in range(200)]
    assert not asked[0] and asked[-1]


def test_memory_that_was_given_back_holds_nan() -> None:
    block = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    under = block.as_strided((4,), (1,))
    address = block.data_ptr()
    del block, under
    assert torch.empty(1 << 20, device="cuda").data_ptr() == address
    again = torch.empty(1 << 20, device="cuda")
    del again
    fresh = torch.empty(1 << 20, device="cuda")
    assert fresh.isnan().all()


def test_a_synchronize_during_a_capture_fails_and_spoils_it() -> None:
    refused: list[str] = []

    def others() -> None:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            refused.append(str(error))

    graph, source = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        source + 1
        thread = threading.Thread(target=others)
        thread.start()
        thread.join()
    assert len(refused) == 1


def test_a_capture_over_two_streams() -> None:
    source, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled = source * 2
        torch.cuda.current_stream().wait_stream(side)
        result = doubled + 1
    source.fill_(3)
    graph.replay()
    assert result.tolist() == [7, 7, 7, 7]
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            source * 2  # nobody waits for it


def test_random_numbers_follow_from_seed_and_offset() -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    first = torch.rand(8, device="cuda", generator=generator)
    assert generator.get_offset() == 4
    assert not torch.equal(first, torch.rand(8, device="cuda", generator=generator))
    generator.set_offset(0)
    assert torch.equal(first, torch.rand(8, device="cuda", generator=generator))


def test_efficient_attention_is_plain_attention() -> None:
    query, key, value = (torch.randn(2, 3, 5, 8, device="cuda", requires_grad=True) for _ in range(3))
    given = (query, key, value)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = F.scaled_dot_product_attention(*given, is_causal=True)
        expected = torch.autograd.grad(plain.square().sum(), given)
    mine = F.scaled_dot_product_attention(*given, is_causal=True)
    assert "Efficient" in type(mine.grad_fn).__name__
    torch.testing.assert_close(mine, plain)
    torch.testing.assert_close(torch.autograd.grad(mine.square().sum(), given), expected)


@pytest.mark.parametrize(
    "fault, test",
    [
        ("STANDIN_DROPS_WAITS", "tests/gpu/test_together.py"),
        ("STANDIN_FORGETS_USERS", "tests/gpu/test_memory.py::test_a_block_that_another_stream_reads_is_not_given_away"),
        ("STANDIN_FORGETS_USERS", "tests/gpu/test_results.py"),
    ],
)
def test_a_planted_fault_is_found(fault: str, test: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--all", "-p", "no:cacheprovider", test]
    done = subprocess.run(
        command, cwd=standin.ROOT, env=standin.environment(**{fault: "1"}), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 1 and f"FAILED {test}" in done.stdout, done.stdout[-3000:]
