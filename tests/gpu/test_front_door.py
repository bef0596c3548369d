"""What a user types with device="cuda": ordinary jobs, studies and loops, whose models and data are made on the CPU."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from examples import digits
from waterflow.errors import InvalidJobError
from waterflow.executor.data.copies import brought
from waterflow.training.runner import JobRunner

DEVICE = torch.device("cuda", 0)
ON_GPU: dict[str, Any] = {"device": "cuda", "memory": "1GiB"}
_numbers = torch.Generator().manual_seed(1)
X, Y = torch.randn(96, 16, generator=_numbers), torch.randint(0, 4, (96,), generator=_numbers)
BATCHES = [*zip(X.split(16), Y.split(16))]


def net(dropout: float = 0.5) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4))


def accuracy(model: nn.Module) -> torch.Tensor:
    return (model(X).argmax(1) == Y).float().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2**-4, momentum=0.5, fused=True)


def job(seed: int, **changes: Any) -> wf.Job:
    settings: dict[str, Any] = {
        "model": net, "data": DataLoader(TensorDataset(X, Y), 16, shuffle=True), "loss": F.cross_entropy,
        "optimizer": sgd, "evaluate": accuracy, "epochs": 2, "seed": seed,
    }  # fmt: skip
    return wf.Job(f"job-{seed}", **(settings | changes))


def assert_same(one: wf.JobResult, other: wf.JobResult) -> None:
    assert one.status == other.status == "completed"
    assert (one.losses, one.metrics) == (other.losses, other.metrics)
    assert one.state_dict is not None and other.state_dict is not None
    assert all(torch.equal(one.state_dict[name], value) for name, value in other.state_dict.items())


def process_numbers() -> tuple[torch.Tensor, torch.Tensor]:
    torch.cuda.init()
    return torch.cuda.get_rng_state(), torch.get_rng_state()


def plain_loop(model: nn.Module, batches: list[Any], seed: int) -> list[float]:
    """Torch's own loop with a fused optimizer; its masks are the process's, seeded."""
    optimizer, losses = sgd(model.to("cuda").parameters()), []
    before = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(seed)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to("cuda")), y.to("cuda"))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.set_rng_state(before)
    return [float(loss) for loss in losses]


# -- the three doors


def test_plain_models_end_as_in_a_fused_loop() -> None:
    torch.manual_seed(0)
    models, twins = [net(), net(0.0)], [net(), net(0.0)]
    for model, twin in zip(models, twins):
        twin.load_state_dict(model.state_dict())
    results = wf.train(models, data=BATCHES, loss=F.cross_entropy, optimizer=sgd, epochs=2, seed=7, **ON_GPU)
    for model, twin, result in zip(models, twins, results):
        assert result.opaque_reason is None
        assert list(result.losses) == plain_loop(twin, BATCHES * 2, 7)
        trained = {name: value.cpu() for name, value in twin.state_dict().items()}
        assert all(torch.equal(result.state_dict[name], value) for name, value in trained.items())
        assert all(tensor.device == DEVICE for tensor in model.state_dict().values()), "it stays on the GPU, as by .to()"


def test_jobs_beside_others_are_as_alone() -> None:
    before = process_numbers()
    alone = [wf.train([job(seed)], **ON_GPU)[0] for seed in range(4)]
    beside = wf.train([job(seed) for seed in range(4)], lanes=4, **ON_GPU)
    for one, other in zip(alone, beside):
        assert_same(one, other)
    assert all(map(torch.equal, before, process_numbers())), "the process's generators were drawn from"
    assert len({result.losses for result in alone}) == 4
    on_cpu = wf.train([job(0, epochs=1)])[0]
    assert on_cpu.status == "completed", "the same job on the CPU"


def test_a_study_of_jobs_and_one_of_loops() -> None:
    def build(trial: optuna.Trial) -> wf.Job:
        return job(trial.number, model=lambda: net(0.25 * (1 + trial.suggest_int("half", 0, 1))))

    losses: dict[int, list[float]] = {}

    def objective(trial: optuna.Trial) -> float:
        torch.manual_seed(trial.number)
        model = digits.cnn(8, 0.25).to(wf.device())
        step = wf.Step(model, loss=F.cross_entropy, optimizer=sgd(model.parameters()))
        losses[trial.number] = [step(batch).item() for batch, _ in zip(digits.loader(), range(12))]
        return digits.accuracy(model.eval()).item()

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    summary = wf.optimize(study, build, n_trials=4, max_concurrent=4, keep_weights="all", **ON_GPU)
    for result, trial in zip(summary.results, study.trials):
        assert_same(result, wf.train([job(trial.number, model=lambda t=trial: net(0.25 * (1 + t.params["half"])))], **ON_GPU)[0])

    values = []
    for at_once in (3, 1):
        study = optuna.create_study(direction="maximize")
        wf.optimize(study, objective, n_trials=3, max_concurrent=at_once, **ON_GPU)
        values.append(([trial.value for trial in study.trials], dict(losses)))
    assert values[0] == values[1]


def test_evaluating_in_an_objective() -> None:
    def right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == target).float().mean()

    def objective(trial: optuna.Trial) -> float:
        torch.manual_seed(trial.number)
        model = net().to(wf.device())
        step = wf.Step(model, loss=F.cross_entropy, optimizer=sgd(model.parameters()))
        for batch in wf.DataLoader(TensorDataset(X, Y), 16, shuffle=True):
            step(batch)
        for data in (TensorDataset(X, Y), DataLoader(TensorDataset(X.cuda(), Y.cuda()), 40)):
            means = wf.evaluate(model, data, metrics={"right": right, "loss": F.cross_entropy})
            outputs = wf.evaluate(
                model, data, reduce=lambda outputs, targets: {"sum": outputs.sum(), "right": right(outputs, targets)}
            )
            on_host = copy.deepcopy(model).cpu().eval()
            with torch.no_grad():
                output = on_host(X)
            expected = {"right": float(right(output, Y)), "loss": float(F.cross_entropy(output, Y))}
            assert means == pytest.approx(expected, rel=1e-4)
            assert outputs == pytest.approx({"sum": float(output.sum()), "right": expected["right"]}, rel=1e-3, abs=1e-3)
        return 0.0

    wf.optimize(optuna.create_study(), objective, n_trials=4, **ON_GPU)


def test_a_loop_in_an_engine() -> None:
    torch.manual_seed(3)
    model = net()
    twin = net()
    twin.load_state_dict(model.state_dict())
    with wf.Engine("cuda", memory="1GiB") as engine:
        with pytest.raises(InvalidJobError, match=r"model.to\('cuda:0'\)"):
            wf.Step(model, loss=F.cross_entropy, optimizer=sgd(model.parameters()), engine=engine)
        optimizer = sgd(model.to("cuda").parameters())
        settings: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": optimizer, "engine": engine}
        with pytest.raises(InvalidJobError, match=r"generator=torch.Generator\('cuda:0'\)"):
            wf.Step(model, **settings, generator=torch.Generator())
        step = wf.Step(model, **settings, generator=torch.Generator("cuda").manual_seed(5))
        assert step.plan_for(BATCHES[0]).batch >= BATCHES[0][0].nbytes
        losses = [float(step(batch)) for batch in BATCHES]
        assert losses == plain_loop(twin, BATCHES, 5)


def test_the_examples_of_the_readme() -> None:
    def build(trial: optuna.Trial) -> wf.Job:
        lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        return wf.Job(
            name=f"trial-{trial.number}", model=digits.cnn, data=digits.loader, loss=F.cross_entropy, epochs=1,
            seed=trial.number, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr), evaluate=digits.accuracy,
        )  # fmt: skip

    study = optuna.create_study(direction="maximize")
    wf.optimize(study, build, n_trials=2, **ON_GPU)
    wf.optimize(study, digits.objective, n_trials=1, **ON_GPU)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3


# -- numbers


@pytest.mark.parametrize("eager", [False, True])
def test_numbers_are_the_jobs_own_wherever_they_are_drawn(eager: bool) -> None:
    """On the device and on the CPU: by the model's function, the data, the step and the evaluation."""

    def data() -> Iterator[Any]:
        for x, y in BATCHES:
            noise = torch.randn(()).item() + torch.randn((), device="cuda").item()
            yield x + noise, y.to("cuda")

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        if eager:
            x = x + torch.rand(16).to(x.device)
        loss = F.cross_entropy(model(x + torch.rand_like(x)), y)
        if eager:
            loss.item()
        return loss

    def evaluate(model: nn.Module) -> float:
        return float(torch.rand(())) + float(torch.rand((), device="cuda"))

    def model() -> nn.Module:
        made = net()
        made[0].bias.data += torch.rand((), device="cuda").item()
        return made

    def noisy(seed: int) -> wf.Job:
        return job(seed, data=data, step=step, loss=None, evaluate=evaluate, model=model)

    before = process_numbers()
    alone = [wf.train([noisy(seed)], **ON_GPU)[0] for seed in range(2)]
    for one, other in zip(alone, wf.train([noisy(seed) for seed in range(3)], **ON_GPU)):
        assert_same(one, other)
        assert (one.opaque_reason is not None) is eager
    assert all(map(torch.equal, before, process_numbers()))


# -- batches


def test_a_batch_is_copied_behind_what_the_stream_has_to_do() -> None:
    """From memory that nobody else writes: the caller goes on at once, and may overwrite its batch."""
    x, expected = X.clone(), X.clone()
    torch.cuda._sleep(200_000_000)
    there = brought((x, 3), DEVICE)[0]
    if os.environ.get("STANDIN_SCHEDULE") != "once":
        assert not torch.cuda.current_stream().query()
    x.zero_()
    assert torch.equal(there.cpu(), expected)


def test_eager_steps_that_are_read_ahead() -> None:
    """The job's thread is ahead of the lane that runs the step, and the lane ahead of the device: a batch stays until then."""

    def rmsprop(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, lr=2**-7)

    def run(data: Any) -> wf.JobResult:
        result = wf.train([job(0, data=data, optimizer=rmsprop, read_ahead=True, epochs=3)], **ON_GPU)[0]
        assert result.opaque_reason is not None
        return result

    assert_same(run(BATCHES), run([(x.to("cuda"), y.to("cuda")) for x, y in BATCHES]))


def test_batches_of_any_form() -> None:
    x, y = BATCHES[0]
    nested = brought({"x": [x, x, x.t()], "n": 3, "y": (np.arange(4), y.to("cuda"))}, DEVICE)
    assert nested["x"][0] is nested["x"][1] and nested["n"] == 3
    assert torch.equal(nested["x"][2].cpu(), x.t()) and nested["x"][2].stride() == x.t().stride()
    assert nested["y"][0].tolist() == [0, 1, 2, 3]
    there = {"x": x.to("cuda"), "n": 3}
    assert brought(there, DEVICE) is there
    packed = brought(pack_padded_sequence(x[:, :, None], torch.full((16,), 16), batch_first=True), DEVICE)
    assert packed.data.device == DEVICE and packed.batch_sizes.device.type == "cpu"


def test_data_that_overwrites_its_batch() -> None:
    def overwriting(pinned: bool) -> Callable[[], Iterator[Any]]:
        def data() -> Iterator[Any]:
            x, y = (torch.empty_like(one, pin_memory=pinned) for one in BATCHES[0])
            for now in BATCHES:
                x.copy_(now[0])
                y.copy_(now[1])
                yield x, y

        return data

    expected = wf.train([job(0, data=BATCHES)], **ON_GPU)[0]
    for pinned in (False, True):
        assert_same(wf.train([job(0, data=overwriting(pinned))], **ON_GPU)[0], expected)


def test_a_list_that_a_step_writes_to() -> None:
    """On the CPU it stays as it is, as each epoch brings it anew; on the GPU each job has a copy of its own."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        batch[0].add_(1.0)
        return F.cross_entropy(model(batch[0]), batch[1])

    for batches in (BATCHES, [(x.to("cuda"), y.to("cuda")) for x, y in BATCHES]):
        before = [x.clone() for x, _ in batches]
        written = [job(seed, data=batches, step=step, loss=None) for seed in range(3)]
        alone = wf.train([written[0]], **ON_GPU)[0]
        assert_same(alone, wf.train(written, **ON_GPU)[0])
        assert all(torch.equal(x, old) for (x, _), old in zip(batches, before))


def test_shared_data_and_a_loss_with_tensors() -> None:
    def jobs(count: int) -> list[wf.Job]:
        data = wf.SharedData(DataLoader(TensorDataset(X, Y), 16, shuffle=True))
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return [job(seed, data=data, loss=loss) for seed in range(count)]

    beside = wf.train(jobs(3), **ON_GPU)
    assert_same(beside[0], wf.train(jobs(1), **ON_GPU)[0])


def test_jobs_over_one_frozen_base() -> None:
    """By tensors that they share, as of LoRA's adapters, and by a module: each is moved once."""
    torch.manual_seed(0)
    base, layer = net().requires_grad_(False).eval(), nn.Linear(4, 4).requires_grad_(False)
    memo = {id(tensor): tensor for tensor in base.parameters()}
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(nn.Sequential(copy.deepcopy(base, memo.copy()), layer, nn.Linear(4, 4)))
        return made[-1]

    def jobs(count: int) -> list[wf.Job]:
        adam: Any = lambda p: torch.optim.Adam([one for one in p if one.requires_grad], lr=2**-4, fused=True)  # noqa: E731
        return [job(seed, model=model, optimizer=adam, train_mode="as_is") for seed in range(count)]

    beside = wf.train(jobs(4), **ON_GPU)
    assert len({one[0][0].weight.data_ptr() for one in made}) == len({id(one[1]) for one in made}) == 1
    assert base[0].weight.device == DEVICE
    assert_same(wf.train(jobs(1), **ON_GPU)[0], beside[0])


# -- results and checkpoints

WITHOUT_GPU = """
import pickle, sys, torch, waterflow as wf
assert not torch.cuda.is_available()
weights = torch.load(sys.argv[1], weights_only=True)
pickle.load(open(sys.argv[2], "rb"))
checkpoint = wf.Checkpoint.load(sys.argv[3])
from tests.gpu.test_front_door import job, net
net().load_state_dict(weights)
from waterflow.training.runner import JobRunner
result = JobRunner(job(0), wf.Engine(), resume=checkpoint).run()
assert result.status == "completed" and result.steps == 12, result
"""


def test_results_and_checkpoints_load_without_a_gpu(tmp_path: Path) -> None:
    taken: list[wf.Checkpoint] = []
    with wf.Engine("cuda", memory="1GiB") as engine:
        runner = JobRunner(job(0), engine, lambda epoch, _: taken.append(runner.snapshot()))
        expected = runner.run()
        taken[0].save(tmp_path / "state")
        again = JobRunner(job(0), engine, resume=wf.Checkpoint.load(tmp_path / "state"))
        assert_same(again.run(), expected)
    assert all(value.device.type == "cpu" for value in expected.state_dict.values())
    torch.save(expected.state_dict, tmp_path / "weights")
    (tmp_path / "result").write_bytes(pickle.dumps(expected))
    ours = ("LD_PRELOAD", "LD_LIBRARY_PATH", "WATERFLOW_CUDA_LIBRARY", "STANDIN_SCHEDULE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    files = [str(tmp_path / name) for name in ("weights", "result", "state")]
    subprocess.run([sys.executable, "-c", WITHOUT_GPU, *files], env=environment, check=True)


def test_an_interrupted_call_goes_on(tmp_path: Path) -> None:
    class Stop(wf.Callback):
        def on_epoch_end(self, job: wf.Job, epoch: int, metrics: Any) -> None:
            raise KeyboardInterrupt

    jobs = [job(0, epochs=3), job(1, epochs=3, shards=2)]
    with pytest.raises(KeyboardInterrupt):
        wf.train(jobs, checkpoint=tmp_path, callbacks=[Stop()], **ON_GPU)
    for resumed, whole in zip(wf.train(jobs, checkpoint=tmp_path, **ON_GPU), wf.train(jobs, **ON_GPU)):
        assert_same(resumed, whole)


def test_a_suspended_job_goes_on() -> None:
    """Its state leaves the GPU, and comes back to it."""
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(net())
        return made[-1]

    def on_epoch(epoch: int, metrics: Any) -> None:
        if epoch == 0:
            runner._safepoint.request("suspend").add_done_callback(lambda _: runner.resume())

    with wf.Engine("cuda", memory="1GiB", device_graphs=False) as engine:
        expected = JobRunner(job(0, epochs=4), engine).run()
    with wf.Engine("cuda", memory="1GiB") as engine:
        runner = JobRunner(job(0, epochs=4, model=model), engine, on_epoch)
        assert_same(runner.run(), expected)
        assert engine.stats().graphs["launched"] > 0
    assert all(tensor.device == DEVICE for tensor in made[0].state_dict().values())


# -- refusals, and one job on several devices


def test_a_gpu_that_is_not_there_is_refused_first(tmp_path: Path) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("something was made")

    there = torch.cuda.device_count()
    strange = f"cuda:{there}"
    jobs = [job(0, model=never, data=never)]
    with pytest.raises(InvalidJobError, match=f"the last is 'cuda:{there - 1}'"):
        wf.train(jobs, device=strange, checkpoint=tmp_path / "folder")
    with pytest.raises(InvalidJobError, match=f"the last is 'cuda:{there - 1}'"):
        wf.train([job(0, model=never, data=never, shards=2)], devices=["cuda:0", strange], checkpoint=tmp_path / "folder")
    study = optuna.create_study()
    with pytest.raises(InvalidJobError, match=f"{there} GPU"):
        wf.optimize(study, never, n_trials=2, device=strange, catch=Exception)
    assert not study.trials and not (tmp_path / "folder").exists()


def test_one_job_on_devices() -> None:
    sharded = job(0, shards=2)
    alone = wf.train([sharded], **ON_GPU)[0]
    assert_same(wf.train([sharded], devices=["cuda:0"], memory="1GiB")[0], alone)
