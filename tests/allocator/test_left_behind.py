"""What steps leave behind in an arena: its bytes when nothing can be moved, the memory around it, and forked children."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

COMMON = """
import gc, os, resource, sys, threading, time
import torch
from torch import nn
from torch.nn import functional as F
import waterflow as wf
from waterflow import _C

torch.set_num_threads(1)
kept = []
act = [lambda x: None]

@torch.library.custom_op("left_behind::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    result = x * 2
    act[0](result)
    return result

odd.register_fake(lambda x: torch.empty_like(x))
odd.register_autograd(lambda ctx, grad: grad * 2)

class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(32, width)
        self.rest = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
    def forward(self, x):
        x = odd(self.first(x))
        for layer in self.rest:
            x = layer(x).relu()
        return odd(x)

def keep_once(result):
    kept.append(result)
    act[0] = lambda x: None

def step_of(engine, batch, width=64, depth=2, seed=0):
    torch.manual_seed(seed)
    net = Net(width, depth)
    with wf.within(engine):
        step = wf.Step(net, loss=F.cross_entropy, optimizer=torch.optim.SGD(net.parameters(), lr=1e-3))
    given = torch.randn(batch, 32), torch.arange(batch) % width
    for _ in range(4):
        step(given)
    return step, given

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

def no_more_addresses():
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + (16 << 20),) * 2)
"""


def run(script: str) -> str:
    """A process of its own: what it prints. Fails where it fails."""
    done = subprocess.run([sys.executable, "-c", COMMON + textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_what_cannot_be_moved_stays_as_it_is() -> None:
    run("""
        engine = wf.Engine(memory="512MiB", lanes=2)
        step, given = step_of(engine, 16)
        no_more_addresses()
        act[0] = keep_once
        step(given)
        before = kept[0].clone()
        placed = engine.native.placed
        step(given)
        assert engine.native.placed == placed  # without addresses steps go on without plans
        engine.close()
        assert torch.equal(kept[0], before) and _C.detached_bytes() == before.nbytes
        kept.clear()
        assert _C.detached_bytes() == 0
    """)


@pytest.mark.slow
def test_who_faces_it_takes_no_place_there_any_more() -> None:
    # The other lane's step is in its middle, and the arena is too small for both at their peaks: without what is kept,
    # it would grow over it.
    run("""
        for spare in range(-64, 65, 32):
            engine = wf.Engine(memory="1GiB", lanes=2, reserve=0)
            (one, given), (other, larger) = step_of(engine, 64, 512), step_of(engine, 65, 512, depth=6, seed=1)
            both = sum(plan.persistent + 2 * plan.batch for plan in (one.plan, other.plan))
            engine.close()
            engine = wf.Engine(memory=both + other.plan.height + (spare << 10), lanes=2, reserve=0)
            try:
                (one, given), (other, larger) = step_of(engine, 64, 512), step_of(engine, 65, 512, depth=6, seed=1)
            except wf.MemoryLimitError:
                continue
            reached, go = threading.Event(), threading.Event()
            def wait(result):
                if result.shape[0] == 65:
                    act[0] = lambda result: keep_once(result) if result.shape[0] == 64 else None
                    reached.set()
                    go.wait(60)
            act[0] = wait
            pending = other.submit(larger)
            assert reached.wait(60)
            old = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + (16 << 20), old[1]))
            first = one.submit(given)
            time.sleep(0.3)
            if not first.run.done:
                go.set()
            first.result()
            before = kept[-1].clone()
            go.set()
            pending.result()
            assert torch.equal(kept[-1], before)
            resource.setrlimit(resource.RLIMIT_AS, old)
            engine.close()
            assert torch.equal(kept[-1], before)
    """)


@pytest.mark.slow
@pytest.mark.parametrize("let_go", [False, True], ids=["kept", "let go within the step"])
def test_only_what_is_kept_stays(let_go: bool) -> None:
    # A clone of a few bytes inside of an operator is planned to die there; kept, it takes its step's memory out of the
    # arena, of which all but its own page has to come back when the step is over.
    run(f"""
        keeping, second = [False], [True]
        def clone(result):
            little = result[:1, :64].clone()
            second[0] = not second[0]
            if second[0] and {let_go}:
                kept.clear()
            elif keeping[0] and not second[0]:
                kept.append(little)
        act[0] = clone
        with wf.Engine(memory="2GiB", lanes=1) as engine:
            step, given = step_of(engine, 4096, 512, depth=8)
            gc.collect()
            before, height = status("VmRSS"), step.plan.height
            assert height > 32 << 20
            for _ in range(3):
                keeping[0] = True
                step(given)
                keeping[0] = False
                step(given)
            assert engine.native.detached == 3
            grown = status("VmRSS") - before
            assert grown < height // 2, (grown, height)
        kept.clear()
    """)


@pytest.mark.slow
@pytest.mark.parametrize("own_engine", [False, True])
def test_children_of_children(own_engine: bool) -> None:
    printed = run(f"""
        engine = wf.Engine(memory="256MiB", lanes=1)
        step, given = step_of(engine, 16)
        act[0] = keep_once
        loss = step(given)
        if os.fork() == 0:
            inner = wf.Engine(memory="64MiB", lanes=1) if {own_engine} else None
            if os.fork() == 0:
                kept.clear()
                del loss
                print("well", flush=True)
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]) & 255)
        assert os.wait()[1] == 0
        engine.close()
    """)
    assert printed.strip() == "well"
