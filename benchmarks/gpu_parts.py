"""The cases of ``gpu_check`` that are no tests; each prints its figures as lines of JSON. Needs a GPU, or its stand-in."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks import networks
from benchmarks.gpu_check import MARK, ROOT

# A stand-in computes on the CPU: there a tenth of the steps, and less.
STEPS = int(os.environ.get("GPU_CHECK_STEPS", 40))
ROUNDS = 3
PAGE = 2 << 20
Batch = tuple[torch.Tensor, torch.Tensor]


def say(**figures: Any) -> None:
    """Print figures; what a later line says of one counts."""
    print(MARK + json.dumps(figures), flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Of several rounds."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def install(deterministic: bool = True) -> None:
    """Waterflow's allocator, before anything touches the device; and kernels that have one result."""
    from waterflow import allocator

    if not allocator.cuda.install(0):
        raise RuntimeError("CUDA was running before the allocator came to it")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic


# -- networks


class Attention(nn.Module):
    """Self-attention over 16 pieces of 16 numbers, with or without dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inward, self.heads, self.outward = nn.Linear(16, 128), nn.Linear(128, 384), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (rows, 256): (rows, 10)."""
        parts = self.heads(self.inward(x.unflatten(1, (16, 16)))).unflatten(2, (3, 4, 32)).permute(2, 0, 3, 1, 4)
        query, key, value = (part.contiguous() for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        return self.outward(mixed.transpose(1, 2).flatten(2).mean(1))


class Recurrent(nn.Module):
    """Two layers of LSTM over 16 pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.outward = nn.LSTM(16, 64, 2, dropout=0.1, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (rows, 256): (rows, 10)."""
        return self.outward(self.cells(x.unflatten(1, (16, 16)))[0][:, -1])


class Sentences(nn.Module):
    """A small BERT that names the class of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_labels": 10}
        self.model = BertForSequenceClassification(BertConfig(vocab_size=64, intermediate_size=512, **sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (rows, 256): (rows, 10)."""
        return self.model(input_ids=x[:, :64].mul(8).long().remainder(64)).logits


def mlp() -> nn.Module:
    """With dropout."""
    return nn.Sequential(
        nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.5), nn.Linear(512, 512), nn.Dropout(0.1), nn.Linear(512, 10)
    )


def cnn() -> nn.Module:
    """With batch norm."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 16, 16)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 256, 10),
    )  # fmt: skip


def deep_mlp() -> nn.Module:
    """Bound by launches."""
    return nn.Sequential(nn.Linear(256, 64), networks.deep_mlp(24, 64), nn.Linear(64, 10))


def tiny_transformer() -> nn.Module:
    """Four encoder layers of 128."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(nn.Unflatten(1, (16, 16)), nn.Linear(16, 128), encoder, nn.Flatten(), nn.Linear(16 * 128, 10))


def resnet18() -> nn.Module:
    """On images of 32 pixels, made of 256 numbers."""
    from torchvision.models import resnet18

    shape = nn.Unflatten(1, (1, 16, 16))
    return nn.Sequential(shape, nn.Upsample(scale_factor=2), nn.Conv2d(1, 3, 1), resnet18(num_classes=10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], torch.dtype | None]] = {
    "mlp": (mlp, None), "cnn": (cnn, None), "lstm": (Recurrent, None),
    "attention": (lambda: Attention(0.0), None), "attention dropout": (lambda: Attention(0.1), None),
    "attention bf16": (lambda: Attention(0.0), torch.bfloat16), "attention bf16 dropout": (lambda: Attention(0.1), torch.bfloat16),
    "deep mlp": (deep_mlp, None), "tiny transformer": (tiny_transformer, None), "resnet-18": (resnet18, None),
    "bert bf16": (Sentences, torch.bfloat16),
}  # fmt: skip


class Training:
    """A network with its optimizer and batches, of one seed: trained by torch's own loop, or by a step of waterflow's."""

    def __init__(self, name: str, seed: int = 0, rows: int = 32) -> None:
        make, self.autocast = NETWORKS[name]
        torch.manual_seed(seed)
        self.model = make().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        numbers = torch.Generator().manual_seed(seed)
        self.batches: list[Batch] = [
            (torch.randn(rows, 256, generator=numbers).cuda(), torch.randint(0, 10, (rows,), generator=numbers).cuda())
            for _ in range(4)
        ]
        self.numbers = torch.Generator("cuda").manual_seed(100 + seed)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch."""
        with torch.autocast("cuda", self.autocast, enabled=self.autocast is not None):
            return F.cross_entropy(self.model(batch[0]), batch[1])

    def update(self, batch: Batch) -> torch.Tensor:
        """One step of torch's own loop."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self, engine: wf.Engine) -> wf.Step:
        """The same as a step."""
        return wf.Step(
            self.model,
            loss=F.cross_entropy,
            optimizer=self.optimizer,
            engine=engine,
            generator=self.numbers,
            autocast=self.autocast,
        )

    def run(self, one: Callable[[Batch], torch.Tensor], steps: int) -> list[torch.Tensor]:
        """Losses; the rate is constant at first, and another one in each step later."""
        losses = []
        for index in range(steps):
            self.optimizer.param_groups[0]["lr"] = 1e-3 if index < steps // 2 else 1e-3 / (1 + index)
            losses.append(one(self.batches[index % 4]))
        return losses

    def ends(self, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        """All that must be equal, bit for bit."""
        return [*(loss.detach().float().cpu() for loss in losses), *(value.cpu() for value in self.model.state_dict().values())]


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- part 1


def card() -> None:
    """What it is measured on, and what the allocator stands on."""
    install()
    properties = torch.cuda.get_device_properties(0)
    smi = shutil.which("nvidia-smi")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() if smi else "no nvidia-smi"
    block = torch.ones(1 << 20, device="cuda")
    say(
        gpu=properties.name, memory_bytes=properties.total_memory, capability=f"{properties.major}.{properties.minor}",
        driver=driver or "not told", torch=torch.__version__, cuda=torch.version.cuda, python=sys.version.split()[0],
        allocator=torch.cuda.memory_reserved() >= block.nbytes,
    )  # fmt: skip


# -- part 2


def bits(name: str) -> None:
    """One job by torch's own loop, by plain steps and by device graphs."""
    install()
    mine = Training(name)
    torch.cuda.manual_seed(100)
    expected = mine.ends(mine.run(mine.update, STEPS))
    made: dict[bool, list[torch.Tensor]] = {}
    for graphs in (False, True):
        mine = Training(name)
        with wf.Engine("cuda", memory="2GiB", lanes=1, device_graphs=graphs) as engine:
            step = mine.step(engine)
            made[graphs] = mine.ends(mine.run(step, STEPS))
            launched = engine.stats().graphs["launched"]
            why = step.opaque_reason
    say(
        as_torch=equal(made[False], expected), graphs_as_plain=equal(made[True], made[False]), graphs_launched=launched, eager=why
    )


# -- part 4


def memory() -> None:
    """Four jobs: what the device has less of than with a bare context, and what waterflow says that it holds."""
    install()
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    free = bare = torch.cuda.mem_get_info()[0]
    with wf.Engine("cuda", memory="1GiB", lanes=4) as engine:
        jobs = [Training(name, seed) for seed, name in enumerate(("mlp", "cnn", "mlp", "cnn"))]
        users = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        steps = [job.step(engine) for job in jobs]
        threads = [threading.Thread(target=job.run, args=(step, STEPS)) for job, step in zip(jobs, steps)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(0.02)
            free = min(free, torch.cuda.mem_get_info()[0])
        for thread in threads:
            thread.join()
        ours = torch.cuda.max_memory_reserved() - users
        within = ours <= engine.limit + len(jobs) * PAGE  # of a tensor that needs one of its own
        say(device_bytes=bare - free, ours_bytes=ours, limit_bytes=engine.limit, within_limit=within)


# -- parts 5 and 6: processes that train in turns


class Worker:
    """A process with torch's own allocator, told by lines how many steps to do; it prints the seconds."""

    def __init__(self, kind: str, name: str, count: int = 1) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu_parts", "work", kind, name, str(count)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def told(self) -> float:
        """The seconds that it took; blocks."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("took "):
                return float(line.split()[1])
        raise RuntimeError("a process has ended before it was measured")

    def go(self, steps: int) -> None:
        """Begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work(kind: str, name: str, count: str) -> None:
    """A worker's loop: ``torch``, ``whole`` (one CUDA graph of a whole step) or ``vmap`` over ``count`` models."""
    steps = {"torch": plain_loop, "whole": whole_step, "vmap": stacked}[kind](name, int(count))
    steps(4)
    torch.cuda.synchronize()
    print("took 0", flush=True)
    for line in sys.stdin:
        print("took", timed(steps, int(line)), flush=True)


def timed(steps: Callable[[int], None], count: int) -> float:
    """Seconds of so many steps, until the device has done them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    steps(count)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def plain_loop(name: str, count: int) -> Callable[[int], None]:
    """Torch's own loop."""
    mine = Training(name)

    def steps(number: int) -> None:
        for index in range(number):
            mine.update(mine.batches[index % 4])

    return steps


def whole_step(name: str, count: int) -> Callable[[int], None]:
    """Torch's own loop, a whole step as one CUDA graph."""
    mine = Training(name)
    mine.optimizer = torch.optim.AdamW(mine.model.parameters(), lr=1e-3, fused=True, capturable=True)
    place = tuple(torch.empty_like(one) for one in mine.batches[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            mine.update(place)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.update(place)

    def steps(number: int) -> None:
        for index in range(number):
            for one, other in zip(place, mine.batches[index % 4]):
                one.copy_(other)
            graph.replay()

    return steps


def stacked(name: str, count: int) -> Callable[[int], None]:
    """``count`` models by ``torch.func``'s ensembling."""
    from torch.func import functional_call, grad, stack_module_state, vmap

    jobs = [Training(name, seed) for seed in range(count)]
    parameters, buffers = stack_module_state([job.model for job in jobs])  # type: ignore[arg-type]
    batches = [tuple(torch.stack(same) for same in zip(*(job.batches[index] for job in jobs))) for index in range(4)]

    def loss(parameters: Any, buffers: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(jobs[0].model, (parameters, buffers), (x,)), y)

    gradients = vmap(grad(loss), randomness="different")
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, fused=True)

    def steps(number: int) -> None:
        for index in range(number):
            for key, value in gradients(parameters, buffers, *batches[index % 4]).items():
                parameters[key].grad = value
            optimizer.step()

    return steps


def side_by_side(engine: wf.Engine, name: str, count: int) -> Callable[[int], None]:
    """``count`` jobs on an engine, each on a thread of its own."""
    jobs = [Training(name, seed) for seed in range(count)]
    each = [(job, job.step(engine)) for job in jobs]

    def steps(number: int) -> None:
        def train(job: Training, step: wf.Step) -> None:
            for index in range(number):
                step(job.batches[index % 4])

        threads = [threading.Thread(target=train, args=one) for one in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    steps(12)
    return steps


def one(name: str) -> None:
    """Steps a second of one job: torch's loop, a whole step as a CUDA graph, ours without and with graphs; in turns."""
    workers = {"torch": Worker("torch", name), "whole_step_graph": Worker("whole", name)}
    install(False)
    engines = {kind: wf.Engine("cuda", memory="2GiB", lanes=1, device_graphs=kind == "graphs") for kind in ("plain", "graphs")}
    ours = {kind: side_by_side(engine, name, 1) for kind, engine in engines.items()}
    for worker in workers.values():
        worker.told()
    in_turns(
        {
            **{kind: lambda worker=worker: alone(worker) for kind, worker in workers.items()},
            **{kind: lambda steps=steps: timed(steps, STEPS) for kind, steps in ours.items()},
        }  # type: ignore[dict-item]
    )
    say(graphs_launched=engines["graphs"].stats().graphs["launched"])
    for thing in (*engines.values(), *workers.values()):
        thing.close()


def alone(worker: Worker, jobs: int = 1) -> float:
    """Seconds of a round of one process, which does the steps of so many jobs."""
    worker.go(jobs * STEPS)
    return worker.told()


def in_turns(ways: dict[str, Callable[[], float]], jobs: int = 1) -> None:
    """Say the steps a second of all jobs, of each way; rounds go from way to way."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            rates[name].append(jobs * STEPS / way())
        say(**{name: spread(values) for name, values in rates.items()})


def many(count: str) -> None:
    """Steps a second of several launch-bound jobs together, by what people do, and by ours; with what ours holds."""
    name, jobs = "deep mlp", int(count)
    workers = [Worker("torch", name) for _ in range(jobs)]
    ensemble = Worker("vmap", name, jobs)
    install(False)
    engines = {lanes: wf.Engine("cuda", memory="2GiB", lanes=lanes, mode="lanes") for lanes in (2, 4)}
    ours = {lanes: side_by_side(engine, name, jobs) for lanes, engine in engines.items()}
    for worker in (*workers, ensemble):
        worker.told()

    def processes() -> float:
        for worker in workers:
            worker.go(STEPS)
        return max(worker.told() for worker in workers)

    in_turns(
        {
            "one_after_the_other": lambda: alone(workers[0], jobs),
            "a_process_each": processes,
            "vmap": lambda: alone(ensemble),
            **{f"ours_{lanes}_lanes": lambda steps=steps: timed(steps, STEPS) for lanes, steps in ours.items()},  # type: ignore[dict-item]
        },
        jobs,
    )
    say(reserved_bytes=torch.cuda.max_memory_reserved(), limit_bytes=sum(engine.limit for engine in engines.values()))
    for thing in (*engines.values(), *workers, ensemble):
        thing.close()


# -- parts 7 to 9


def resnet50() -> nn.Module:
    """As torchvision has it."""
    from torchvision.models import resnet50

    return resnet50()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """As ResNets are trained."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


def largest() -> None:
    """Two ResNet-50 at the largest batch that is planned for 8 GiB: no step runs out of memory; predicted and measured peak."""
    memory, side = os.environ.get("GPU_CHECK_MEMORY", "8GiB"), int(os.environ.get("GPU_CHECK_PIXELS", 224))

    def job(rows: int, name: str) -> wf.Job:
        batch = torch.randn(rows, 3, side, side), torch.randint(0, 1000, (rows,))
        return wf.Job(name, model=resnet50, data=[batch] * 6, loss=F.cross_entropy, optimizer=sgd, epochs=1)

    found = wf.max_batch_size(job(4, "resnet"), copies=2, memory=memory)
    assert found.run is not None
    rows = found.jobs[0].size
    say(batch=rows, predicted_bytes=found.run.peak + found.reserve, limit_bytes=found.memory)
    results = wf.train([job(rows, f"resnet {number}") for number in range(2)], device="cuda", memory=memory)
    say(completed=all(one.status == "completed" for one in results), peak_bytes=torch.cuda.max_memory_reserved())


def guaranteed() -> None:
    """Milliseconds of a guaranteed job's steps, alone and beside an opportunistic one."""
    install(False)
    with wf.Engine("cuda", memory="2GiB", lanes=2) as engine:
        first, second = Training("mlp", 0), Training("tiny transformer", 1, rows=256)
        step, other = first.step(engine), second.step(engine)
        engine.set_priority(other, "opportunistic")
        first.run(step, 12), second.run(other, 12)
        over = threading.Event()

        def beside() -> None:
            while not over.is_set():
                second.run(other, 4)

        for kind in ("alone", "beside"):
            thread = threading.Thread(target=beside)
            if kind == "beside":
                thread.start()
            taken = [milliseconds(first, step) for _ in range(10 * STEPS)]
            say(**{f"p50_{kind}_ms": statistics.median(taken), f"p99_{kind}_ms": sorted(taken)[int(0.99 * len(taken))]})
        over.set()
        thread.join()


def milliseconds(job: Training, step: wf.Step) -> float:
    """Of one step until its loss is there; not until the device has done what others have asked of it."""
    start = time.perf_counter()
    job.run(step, 1)[0].item()
    return (time.perf_counter() - start) * 1e3


def study() -> None:
    """The demo's study on the GPU, and the same trials by ``study.optimize``."""
    from examples import demo

    trials = int(os.environ.get("GPU_CHECK_TRIALS", 16))
    demo.digits()
    ours = demo.create_study()
    done = wf.optimize(ours, demo.build, trials, device="cuda")
    say(ours_seconds=done.seconds, ours_steps=done.steps)
    seconds, steps = demo.one_by_one(ours, 0)
    say(optuna_seconds=seconds, optuna_steps=steps, optuna_on="the CPU, as the demo has it")


# -- part 10


def memcheck() -> None:
    """compute-sanitizer on one test with graphs and one of two lanes; or that there is none."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        say(errors="there is no compute-sanitizer here")
        return
    tests = [
        "tests/gpu/test_forms.py::test_bits_as_alone_without_graphs[plain]",
        "tests/gpu/test_engine.py::test_bitwise_as_alone[2]",
    ]
    command = [tool, "--tool", "memcheck", "--target-processes", "all", sys.executable, "-m", "pytest", "-q", "--all", *tests]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(ended.stdout, ended.stderr)
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if "ERROR SUMMARY" in line]
    say(errors=lines[-1].strip() if lines else f"no summary; exit status {ended.returncode}")


def host_time() -> None:
    """Microseconds of the host's for a step of graphs: all of the call, and what the lane had of it."""
    install(False)
    with wf.Engine("cuda", memory="2GiB", lanes=1) as engine:
        mine = Training("deep mlp")
        step = mine.step(engine)
        mine.run(step, 12)
        busy, count = engine.stats().busy_seconds, 10 * STEPS
        start = time.perf_counter()
        for index in range(count):
            step(mine.batches[index % 4])
        taken = time.perf_counter() - start
        issue = engine.stats().busy_seconds - busy
        say(python_us=(taken - issue) / count * 1e6, issue_us=issue / count * 1e6)


def main() -> int:
    """Command line: the name of a case, and its arguments."""
    name, *arguments = sys.argv[1:]
    cases: dict[str, Callable[..., None]] = {
        "card": card, "bits": bits, "memory": memory, "work": work, "one": one, "many": many, "largest": largest,
        "guaranteed": guaranteed, "study": study, "memcheck": memcheck, "host_time": host_time,
    }  # fmt: skip
    cases[name](*arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
