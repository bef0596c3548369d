"""Limits of engines on a GPU's memory, on the stand-in for the driver: arenas, pools and graphs together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.allocator.fake_cuda import FakeCuda
from tests.allocator.test_cuda_memory import run as run_program

# A limit of 20 pages on an arena and a pool; its lane's stream, and one of the user's.
HEAD = """
_C.cuda_pool(0, 0)
device = _C.cuda_device(0)
lane, user = fake.new_stream(), fake.new_stream()
arena = _C.CudaArena(device, 20 * PAGE, PAGE)
arena.resize(20 * PAGE)

def limit_of(pages, stream):
    return _C.CudaLimit(0, pages * PAGE, [device.adopt_stream(stream)], arena)

def reserved(kind="reserved"):
    return _C.cuda_stats(0)[kind] // PAGE

limit = limit_of(20, lane)
"""


def run(folder: Path, body: str) -> None:
    """Run a program in a process of its own."""
    indent = body[: len(body) - len(body.lstrip())].replace("\n", "")
    run_program(folder, "".join(indent + line + "\n" for line in HEAD.splitlines()) + body)


@pytest.fixture(autouse=True, scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> None:
    FakeCuda(tmp_path_factory.mktemp("built"))


@pytest.mark.needs_time("it runs in a process of its own, which imports torch")
def test_arenas_and_pool_have_it_together(tmp_path: Path) -> None:
    run(tmp_path, """
        block = malloc(12 * PAGE, 0, lane)
        free(block, 12 * PAGE, 0, lane)
        assert not arena.back(0, 12 * PAGE) and reserved() == 20, "what is free in the pool is in the way"
        _C.cuda_give_back(0)
        assert arena.back(0, 12 * PAGE) and reserved() == 12
        block = malloc(11 * PAGE, 0, lane)
        assert reserved() == 11 and arena.pages == 0, "nothing stands on the arena's pages"
        with pytest.raises(RuntimeError, match=r"memory= of the engines on the device is 40.0 MiB together: there is no room"):
            _C.cuda_malloc(10 * PAGE, 0, lane)
        assert arena.back(0, 9 * PAGE) and not arena.back(0, 10 * PAGE)
        assert reserved("peak_reserved") == 20
        free(block, 11 * PAGE, 0, lane)
    """)  # fmt: skip


@pytest.mark.slow
def test_what_is_free_behind_work_under_way_is_given_back_when_that_is_done(tmp_path: Path) -> None:
    run(tmp_path, """
        block = malloc(20 * PAGE, 0, lane)
        fake.stall(lane)
        free(block, 20 * PAGE, 0, lane)
        assert not arena.back(0, PAGE) and fake.count("cuEventSynchronize") == 0
        _C.cuda_give_back(0)
        assert fake.count("cuEventSynchronize") == 1 and reserved() == 0 and arena.back(0, 20 * PAGE)
        assert fake.count("cuCtxSynchronize") == 0, "another thread may be capturing"
    """)  # fmt: skip


@pytest.mark.slow
def test_what_the_user_holds_does_not_count(tmp_path: Path) -> None:
    run(tmp_path, """
        del limit
        plain = 30 * PAGE
        before = malloc(plain, 0, user)
        limit = limit_of(20, lane)
        assert arena.back(0, 20 * PAGE) and reserved() == 50
        beside = malloc(plain, 0, user)
        assert reserved() == 80 and arena.pages == 20
        small = malloc(10, 0, user)
        assert reserved() == 81 and arena.pages == 20, "by whole pages"
        free(before, plain, 0, user)
        arena.discard(0, 0, 20 * PAGE)
        assert reserved() == 61 and arena.back(0, 19 * PAGE) is False, "the pool has what the user gave back"
        _C.cuda_give_back(0)
        assert arena.back(0, 19 * PAGE) and reserved() == 50
    """)  # fmt: skip


@pytest.mark.slow
def test_what_jobs_have_claimed_counts_wherever_it_lies(tmp_path: Path) -> None:
    run(tmp_path, """
        model = malloc(8 * PAGE, 0, user)
        assert arena.back(0, 20 * PAGE)
        arena.discard(0, 0, 20 * PAGE)
        limit.claim(14 * PAGE)
        assert not arena.back(0, 13 * PAGE) and arena.back(0, 12 * PAGE) and reserved() == 20
        batch = malloc(6 * PAGE, 0, user)
        assert reserved() == 14 and arena.back(0, 6 * PAGE) and reserved() == 20
        own = malloc(6 * PAGE, 0, user)
        assert reserved() == 26, "more than that is the user's own"
        limit.claim(0)
        assert arena.back(0, 20 * PAGE)
    """)  # fmt: skip


@pytest.mark.slow
def test_it_ends_and_what_steps_left_behind_is_the_users(tmp_path: Path) -> None:
    run(tmp_path, """
        state = malloc(15 * PAGE, 0, lane)
        assert not arena.back(0, 6 * PAGE)
        del limit
        assert arena.back(0, 20 * PAGE) and malloc(100 * PAGE, 0, lane)
        limit = limit_of(20, lane)
        assert malloc(15 * PAGE, 0, lane) and reserved() == 130, "the second one does not count the first one's"
    """)  # fmt: skip


@pytest.mark.slow
def test_several_limits_are_their_sum(tmp_path: Path) -> None:
    run(tmp_path, """
        second = limit_of(5, fake.new_stream())
        with pytest.raises(RuntimeError, match="no room"):
            _C.cuda_malloc(26 * PAGE, 0, lane)
        both = malloc(25 * PAGE, 0, lane)
        free(both, 25 * PAGE, 0, lane)
        again = limit_of(1, lane)
        del again
        assert malloc(25 * PAGE, 0, lane) and not arena.back(0, PAGE), "the lane is the first one's, too"
    """)  # fmt: skip


@pytest.mark.slow
def test_graphs_of_engines_count_and_those_of_users_do_not(tmp_path: Path) -> None:
    run(tmp_path, """
        assert arena.back(0, 20 * PAGE)
        for pool, stream, ours in (((0, 1), user, False), ((2**64 - 1, 1), lane, True)):
            before = reserved()
            _C.cuda_begin_pool(0, pool, [stream])
            assert _C.cuda_malloc(PAGE, 0, stream)
            _C.cuda_end_pool(0, pool)
            assert (arena.pages, reserved() - before) == ((0, 16 - 20) if ours else (20, 16))
    """)  # fmt: skip


@pytest.mark.slow
def test_threads_never_exceed_it(tmp_path: Path) -> None:
    run(tmp_path, """
        import random
        refused = []
        def lanes(seed):
            chance, held = random.Random(seed), []
            for _ in range(300):
                if held and chance.random() < 0.5:
                    free(*held.pop(chance.randrange(len(held))), 0, lane)
                else:
                    size = int(PAGE * chance.uniform(0.01, 9))
                    try:
                        held.append((_C.cuda_malloc(size, 0, lane), size))
                    except RuntimeError:
                        refused.append(size)
            for at, size in held: free(at, size, 0, lane)
        def arenas():
            for pages in range(300):
                if not arena.back(0, pages % 20 * PAGE):
                    _C.cuda_give_back(0)
        threads = [threading.Thread(target=lanes, args=(i,)) for i in range(3)]
        for thread in threads: thread.start()
        arenas()
        for thread in threads: thread.join()
        assert refused and reserved("peak_reserved") == 20
        arena.check()
        assert malloc(20 * PAGE, 0, lane)
    """)  # fmt: skip
