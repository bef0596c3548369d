"""Lanes run on streams of waterflow's own: no user has them, and each engine finds those of the one before."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf

LANES = 2


class Told(nn.Module):
    """What cannot be captured, and so sees the stream that it runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.meeting: threading.Barrier | None = None
        self.streams: list[torch.cuda.Stream] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.meeting is not None:
            self.meeting.wait(60)
        self.streams.append(torch.cuda.current_stream())
        y = self.layer(x)
        return y * 2 if y.sum().item() > 0 else y


def streams_of(engine: wf.Engine) -> list[torch.cuda.Stream]:
    """The streams of all its lanes, each of which runs a step at the same time."""
    models = [Told().cuda() for _ in range(engine.lanes)]
    batch = torch.ones(2, 8, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
    torch.cuda.synchronize()

    steps = [
        wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), engine=engine)
        for model in models
    ]
    for step in steps:  # the first ones are measured, one at a time
        for _ in range(4):
            step(batch)
    meeting = threading.Barrier(engine.lanes)
    for model in models:
        model.meeting = meeting
    threads = [threading.Thread(target=step, args=(batch,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [model.streams[-1] for model in models]


def handles(streams: list[torch.cuda.Stream]) -> set[int]:
    return {stream.cuda_stream for stream in streams}


def test_nobody_else_gets_a_lanes_stream_and_the_next_engine_does() -> None:
    with wf.Engine("cuda", memory="1GiB", lanes=LANES, mode="lanes") as engine:
        mine = handles(streams_of(engine))
        users = handles([torch.cuda.Stream() for _ in range(64)])  # torch hands out 32 in turns
        assert len(mine) == LANES and not mine & users
        with wf.Engine("cuda", memory="1GiB", lanes=LANES, mode="lanes") as second:
            others = handles(streams_of(second))
            assert len(others) == LANES and not mine & others
    for _ in range(3):
        with wf.Engine("cuda", memory="1GiB", lanes=LANES, mode="lanes") as engine:
            assert handles(streams_of(engine)) <= mine | others


def test_a_lanes_stream_is_a_stream_as_any_other_to_torch() -> None:
    with wf.Engine("cuda", memory="1GiB", lanes=1) as engine:
        [stream] = streams_of(engine)
        assert stream == torch.cuda.ExternalStream(stream.cuda_stream) and stream.stream_id == stream.cuda_stream
        assert stream.priority == torch.cuda.Stream().priority and stream.device == torch.device("cuda", 0)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            numbers = torch.arange(1000, device="cuda")
        stream.wait_stream(side)
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() == stream
            numbers.record_stream(stream)
            total = numbers.sum()
            behind = torch.cuda.Event()
            behind.record()
        assert torch.cuda.current_stream() != stream
        behind.synchronize()
        assert stream.query() and total.item() == 499_500
