"""The command: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import waterflow
from waterflow.cli.config import load_train
from waterflow.cli.main import app
from waterflow.cli.plan import job_named, plan_for_gpu
from waterflow.training.progress import ProgressLine

EXAMPLES = Path(__file__).parents[2] / "examples"
# Used by the configs below.
USER_CODE = """
import dataclasses
import torch
from torch import nn
import waterflow as wf

print("user code talks")

def model(width=8): return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
def data(batch_size=8): return [(torch.randn(batch_size, 4), torch.zeros(batch_size, dtype=torch.int64))] * 3
def broken(): raise RuntimeError("no weights today")
def looks(model, batch): return model(batch[0]).sum() if batch[1].sum().item() == 0 else None
def evaluate(model): return {"ones": sum(p.numel() for p in model.parameters())}
def number(): return 3

def job(width=8, name="from-job"):
    return wf.Job(name=name, model=lambda: model(width), data=data, loss=nn.functional.cross_entropy,
                  optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

def long(): return dataclasses.replace(job(), epochs=50)

def deep(recompute=None):
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return wf.Job(name="deep", model=lambda: nn.Sequential(*layers), loss=nn.functional.mse_loss,
                  data=[(torch.zeros(256, 64), torch.zeros(256, 64))], optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                  recompute=recompute)

def objective(trial):
    network = model(trial.suggest_categorical("width", [4, 8]))
    optimizer = torch.optim.SGD(network.parameters(), lr=trial.suggest_float("lr", 1e-3, 1.0, log=True))
    step = wf.Step(network, loss=nn.functional.cross_entropy, optimizer=optimizer)
    if trial.number == 1:
        raise ValueError("boom in trial 1")
    return float(sum(step(batch) for batch in data()))

def build(trial):
    return job(trial.suggest_categorical("width", [4, 8]), f"trial {trial.number}")
"""
PIECES = "model: code.py:model, data: code.py:data, loss: cross_entropy, optimizer: {name: sgd, lr: 1e-2}, seed: 0"


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def config(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


# -- the command itself


def test_version_and_help():
    assert run("--version").stdout.startswith("waterflow 0.")
    said = run("--help").stdout
    assert all(command in said for command in ("study", "train", "plan"))


@pytest.mark.slow
def test_entry_point_tells_errors_in_one_line(folder: Path):
    command = [str(Path(sys.executable).parent / "waterflow"), "train", "nowhere.yaml"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert ended.returncode == 2 and ended.stdout == ""
    assert lines(ended.stderr) == ["waterflow: there is no file nowhere.yaml"]
    ended = subprocess.run([*command, "--debug"], capture_output=True, text=True, cwd=folder)
    assert ended.returncode != 0 and "Traceback" in ended.stderr


# -- study


def test_study_of_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (EXAMPLES / "study.yaml").read_text()
    assert "n_trials: 12" in text and "digits.py:objective" in text
    short = text.replace("n_trials: 12", "n_trials: 3").replace("digits.py", str(EXAMPLES / "digits.py"))
    ended = run("study", config(tmp_path, short.replace("demo-output", str(tmp_path / "out"))), "--json")
    assert ended.exit_code == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["run"]["trials"] == 3 and report["direction"] == "maximize"
    assert is_png(tmp_path / "out" / "study" / "memory.png")


def test_study_goes_on_in_a_storage_and_tells_of_failures(folder: Path):
    path = config(
        folder,
        "objective: code.py:objective\nn_trials: 2\nmax_concurrent: 1\nsampler: random\npruner: none\n"
        "storage: sqlite:///study.db\nstudy_name: kept\n",
    )
    ended = run("study", path)
    assert ended.exit_code == 1
    (line,) = lines(ended.stderr)
    assert line.startswith("waterflow: trial 1 failed: ValueError: boom in trial 1 (") and "code.py" in line
    assert "complete" in ended.stdout and "fail" in ended.stdout
    ended = run("study", path, "--json")  # trials 2 and 3: none fails
    assert ended.exit_code == 0
    assert [t["state"] for t in json.loads(ended.stdout)["trials"]] == ["complete", "fail", "complete", "complete"]


def test_a_study_with_checkpoints_counts_all_its_trials(folder: Path):
    text = (
        "build: code.py:build\nn_trials: 2\nmax_concurrent: 1\nstorage: sqlite:///study.db\nstudy_name: kept\ncheckpoint: state\n"
    )
    path = config(folder, text)
    assert [json.loads(run("study", path, "--json").stdout)["run"]["trials"] for _ in range(2)] == [2, 0]


def test_trials_that_return_no_number_are_told(folder: Path):
    (folder / "code.py").write_text(USER_CODE + "\ndef nothing(trial): return None\n")
    ended = run("study", config(folder, "objective: code.py:nothing\nn_trials: 1\n"))
    (line,) = lines(ended.stderr)
    assert ended.exit_code == 1 and line.startswith("waterflow: trial 0 failed: ") and "None" in line


def test_study_that_builds_jobs(folder: Path):
    ended = run("study", config(folder, "build: code.py:build\nn_trials: 2\nmax_concurrent: 2\n"), "--json")
    assert ended.exit_code == 0 and "user code talks" in ended.stderr
    assert [t["reports"] for t in json.loads(ended.stdout)["trials"]] == [1, 1]


def test_a_study_that_would_maximize_a_training_loss(folder: Path):
    ended = run("study", config(folder, "build: code.py:build\nn_trials: 3\nmax_concurrent: 1\ndirection: maximize\n"))
    told = lines(ended.stderr)
    assert ended.exit_code == 1 and "job 'trial 0' has no evaluate=" in told[-1] and "trial 1" not in ended.stderr


@pytest.mark.slow
def test_a_trial_over_its_time_limit(folder: Path):
    (folder / "code.py").write_text(USER_CODE + "\nimport time\ndef slow(trial):\n    while True: time.sleep(0.01)\n")
    ended = run("study", config(folder, "objective: code.py:slow\nn_trials: 1\ntrial_timeout: 0.5\n"))
    (line,) = lines(ended.stderr)
    assert ended.exit_code == 1 and "trial 0 ran longer than its limit trial_timeout=0.5 s" in line


# -- train


def test_settings_of_a_job(folder: Path):
    from waterflow.cli.config import load_train

    text = f"jobs:\n- {{{PIECES}, timeout: 2.5, train_mode: as_is}}\n- {{job: code.py:deep, timeout: 3}}\n"
    one, other = load_train(config(folder, text)).jobs
    assert (one.timeout, one.train_mode, other.timeout, other.train_mode) == (2.5, "as_is", 3, "auto")
    assert load_train(config(folder, text.replace("2.5", "1.5min"))).jobs[0].timeout == 90.0
    for wrong in ("timeout: -1", "train_mode: eval"):
        ended = run("train", config(folder, f"jobs:\n- {{{PIECES}, {wrong}}}\n"))
        assert ended.exit_code == 2 and wrong.split(":")[0] in ended.stderr and "must be" in ended.stderr


@pytest.mark.parametrize(("line", "own", "trained"), [("", "", 50), ("epochs: 50", "", 50), ("epochs: 3", "epochs: 5", 5)])
def test_the_epochs_of_a_job_that_sets_its_own(folder: Path, line: str, own: str, trained: int):
    (job,) = load_train(config(folder, f"{line}\njobs:\n- job: code.py:long\n  {own}\n")).jobs
    assert job.epochs == trained


def test_train_of_the_examples(tmp_path: Path):
    text = (EXAMPLES / "train.yaml").read_text().replace("epochs: 3", "epochs: 1")
    text = text.replace("digits.py", str(EXAMPLES / "digits.py")).replace("demo-output", str(tmp_path / "out"))
    ended = run("train", config(tmp_path, text))
    assert ended.exit_code == 0, ended.stderr
    assert all(name in ended.stdout for name in ("cnn-16", "cnn-32", "mlp", "completed"))
    assert is_png(tmp_path / "out" / "train" / "memory.png")


def test_train_takes_jobs_and_pieces(folder: Path):
    path = config(
        folder,
        "epochs: 2\nmemory: 200MiB\njobs:\n- {job: code.py:job, args: {width: 16}, seed: 1}\n"
        f"- {{{PIECES}, evaluate: code.py:evaluate, args: {{width: 4}}, data_args: {{batch_size: 2}}, epochs: 1}}\n",
    )
    ended = run("train", path, "--json")
    assert ended.exit_code == 0, ended.stderr
    jobs = json.loads(ended.stdout)["jobs"]
    assert [(j["name"], j["steps"], j["status"]) for j in jobs] == [("from-job", 6, "completed"), ("job-1", 3, "completed")]
    assert jobs[1]["metrics"] == {"ones": 30.0}


def test_a_failed_job_shows_and_leaves_the_others(folder: Path):
    path = config(folder, f"jobs:\n- {{name: good, {PIECES}}}\n- {{name: bad, {PIECES.replace(':model', ':broken')}}}\n")
    ended = run("train", path)
    assert ended.exit_code == 1
    (line,) = lines(ended.stderr)
    assert line.startswith("waterflow: job 'bad' failed: RuntimeError: no weights today") and "code.py" in line
    assert "completed" in ended.stdout and "failed" in ended.stdout
    report = json.loads(run("train", path, "--json").stdout)
    assert [j["status"] for j in report["jobs"]] == ["completed", "failed"]


@pytest.mark.needs_time("the first model of a process imports much of torch")
@pytest.mark.parametrize("loss", ["torch.nn.functional.mse_loss", "torch.nn.CrossEntropyLoss", "code.py:looks"])
def test_losses(folder: Path, loss: str):
    pieces = PIECES.replace("cross_entropy", loss)
    if "mse" in loss:
        pieces = pieces.replace("code.py:data", "code.py:floats")
        (folder / "code.py").write_text(USER_CODE + "\ndef floats(): return [(torch.randn(8, 4), torch.randn(8, 2))]\n")
    ended = run("train", config(folder, f"jobs: [{{{pieces}}}]"), "--json")
    assert ended.exit_code == 0, ended.stderr


# -- plan


def test_plan_of_the_examples():
    ended = run("plan", EXAMPLES / "train.yaml")
    assert ended.exit_code == 0, ended.stderr
    assert "together: cnn-16, cnn-32, mlp" in ended.stdout and "none waits" in ended.stdout


@pytest.mark.slow
def test_plan_for_a_gpu_that_is_not_there(folder: Path):
    path = config(folder, f"jobs:\n  - {{name: a, {PIECES}}}\n")
    ended = run("plan", path, "--gpu", "v100-32g", "--copies", "2", "--json")
    assert ended.exit_code == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["gpu"] == "v100-32g" and told["sets"] == [["a 1", "a 2"]] and len(told["largest"]["jobs"]) == 2
    shown = run("plan", path, "--memory", "64MiB", "--copies", "2", "--report", folder / "plan.png").stdout
    assert is_png(folder / "plan.png") and "drawn: " in shown
    assert "64.0 MiB for jobs" in shown and "largest batches in 64.0 MiB" in shown
    less = run("plan", config(folder, "jobs: [{name: deep, job: code.py:deep}]"), "--memory", "1300kB").stdout
    assert "fits alone with recompute" in less and "deep with recompute='auto' and its batch of 256: " in less
    path = config(folder, f"jobs:\n  - {{name: a, {PIECES}}}\n")
    tight = run("plan", path, "--memory", "300B")
    assert tight.exit_code == 0 and "does not fit" in tight.stdout and "even the smallest batches must fit" in tight.stdout


def test_plan_draws_why_nothing_fits(folder: Path):
    path = config(folder, f"jobs: [{{name: a, {PIECES}}}]")
    for memory in ("300B", "600B"):  # less than the state, and than the step
        drawn = run("plan", path, "--memory", memory, "--report", "tight.png")
        assert drawn.exit_code == 0 and "drawn: a alone with a batch of 1: tight.png" in drawn.stdout
        assert is_png(folder / "tight.png")
        (folder / "tight.png").unlink()
    told = json.loads(run("plan", path, "--memory", "300B", "--json").stdout)
    assert told["fits"] is False and told["jobs"][0]["fits"] is False and told["largest"] is None
    told = json.loads(run("plan", path, "--memory", "64MiB", "--json").stdout)
    assert told["fits"] is True and told["jobs"][0]["fits"] is True
    assert told["reserve_bytes"] == 16 << 20 and told["batches_held"] == 2 == told["largest"]["batches_held"]
    assert json.loads(run("plan", path, "--json").stdout)["fits"] is True


def test_a_long_plan_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, folder: Path):
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = []
    for delay in (0.0, 60.0):
        monkeypatch.setattr(sys, "stderr", screen := Screen())
        with ProgressLine(None, "captures", show=True, delay=delay) as progress:
            [(job, *_)] = [load_train(config(folder, f"jobs: [{{name: a, {PIECES}}}]")).jobs]
            plan_for_gpu([job], memory="64MiB", captured=progress.advance)
        shown.append(screen.getvalue())
    assert re.search(r"[2-9] captures", shown[0]) and shown[1].strip() == ""


def test_plan_of_a_job_that_is_not_captured(folder: Path):
    """It is named, and the others are planned; tables are not cut where nobody looks at a terminal."""
    eager = f"{{name: eager, {PIECES.replace('cross_entropy', 'code.py:looks')}}}"
    path = config(folder, f"jobs: [{eager}, {{name: a, {PIECES}}}]")
    shown = run("plan", path, "--memory", "64MiB")
    assert shown.exit_code == 0 and "largest batches in 64.0 MiB" in shown.stdout
    assert "eager cannot be captured: it would train eagerly, with memory that is not known before it runs: " in shown.stdout
    told = json.loads(run("plan", path, "--memory", "64MiB", "--json").stdout)
    assert told["fits"] is None and told["sets"] == [["a"]]
    assert told["jobs"][1]["name"] == "eager" and "values of its tensors" in told["jobs"][1]["opaque_reason"]
    broken = config(folder, f"jobs: [{{name: bad, {PIECES.replace(':model', ':broken')}}}]")
    assert "job 'bad' cannot be planned: RuntimeError: no weights today" in run("plan", broken, "--memory", "64MiB").stderr
    alone = run("plan", config(folder, f"jobs: [{eager}]"), "--memory", "64MiB", "--report", "plan.png")
    assert alone.exit_code == 1 and "there is nothing to draw: no job could be captured" in alone.stderr
    here = run("plan", path).stdout
    assert "…" not in here and "eager cannot be captured: " in here and "runs eagerly: memory unknown" in here


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a config, or a model by --model resnet50"),
        (("--model", "resnet50"), "--model, --copies, --recompute and --report need a device: add --gpu v100-32g"),
        (("--model", "resnet50", "--gpu", "v100-32g", "--recompute", "much"), "recompute must be 'auto'"),
        (("--model", "resnet5", "--gpu", "v100-32g"), "did you mean 'resnet50'"),
        (("--model", "code.py:model", "--gpu", "v100-32g"), "must return a waterflow.Job; it returned"),
        (("--model", "resnet50", "--gpu", "v1000"), "--gpu: no GPU is called 'v1000'; did you mean v100-32g"),
        (("--model", "resnet50", "--gpu", "p100-16g", "--memory", "20GiB"), "waterflow: --memory: memory='20GiB'"),
        (("--model", "resnet50", "--memory", "24"), "--memory: memory='24' is 24 B; did you mean '24GiB'?"),
        (("config.yaml", "--report", "plan.png"), "--report need a device"),
        (("config.yaml", "--memory", "1GiB", "--groups"), "--groups shows plans for this machine"),
        (("config.yaml", "--memory", "1GiB", "--report", "nowhere/plan.png"), "--report: there is no folder nowhere"),
        (("config.yaml", "--memory", "1GiB", "--report", "plan.jpg"), "--report: pictures are PNG files; call it 'plan.png'"),
    ],
)
def test_plan_tells_what_is_missing(folder: Path, arguments: tuple[str, ...], said: str):
    ended = run("plan", *arguments)
    assert ended.exit_code == 2 and said in ended.stderr, ended.stderr


def test_plan_names_what_there_is(folder: Path):
    ended = run("plan", "--model", "unheard-of", "--gpu", "v100-32g")
    assert ended.exit_code == 2 and "the zoo has no 'unheard-of' (known: resnet50, " in ended.stderr
    assert "resnet50, " in ended.stderr and "bert, " in ended.stderr and "module:function" in ended.stderr
    ended = run("plan", "--model", "resnet50", "--gpu", "unheard-of")
    assert ended.exit_code == 2 and "v100-32g" in ended.stderr and "h100-80g" in ended.stderr


def planned_elsewhere(folder: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """``waterflow plan`` in a folder where there is no source tree, with this tree's package alone on the path."""
    (folder / "path").mkdir()
    (folder / "path" / "waterflow").symlink_to(Path(waterflow.__file__).parent)
    code = f"{before}\nimport sys\nfrom waterflow.cli.main import main\nsys.argv = ['waterflow', 'plan', *{arguments!r}]\nmain()"
    environment = os.environ | {"PYTHONPATH": str(folder / "path"), "PYTHONSAFEPATH": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_model_of_the_zoo_is_planned_from_anywhere(tmp_path: Path):
    ended = planned_elsewhere(tmp_path, "--gpu", "v100-32g", "--model", "resnet50", "--json")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["fits"] is True and [job["name"] for job in told["jobs"]] == ["resnet50"]
    assert told["largest"]["jobs"][0]["size"] > 100


def test_a_model_of_the_zoo_has_the_names_that_people_know():
    assert job_named("bert-base", Path()).model is job_named("bert", Path()).model


@pytest.mark.slow
def test_a_library_that_is_not_installed_is_named(tmp_path: Path):
    hide = "import importlib.util as u; find = u.find_spec; u.find_spec = lambda n, p=None: None if n == 'torchvision' else find(n, p)"
    ended = planned_elsewhere(tmp_path, "--gpu", "v100-32g", "--model", "resnet50", before=hide)
    assert ended.returncode != 0 and "Traceback" not in ended.stderr
    told = " ".join(ended.stderr.split())
    assert "needs torchvision, which is not installed: pip install torchvision" in told, ended.stderr


def deep_with(folder: Path, recompute: str, memory: str = "") -> Path:
    return config(folder, f"{memory}jobs: [{{name: deep, job: code.py:deep, args: {{recompute: {recompute}}}}}]")


@pytest.mark.slow
def test_plan_of_jobs_that_recompute(folder: Path):
    """For a GPU, and for this machine."""
    shown = run("plan", deep_with(folder, "auto"), "--memory", "1300kB").stdout
    assert "fits, recomputing" in shown and "deep recomputes with its batch of 256: " in shown
    assert "deep alone, recomputing: " in shown
    told = json.loads(run("plan", deep_with(folder, "auto"), "--memory", "1300kB", "--json").stdout)
    assert told["sets"] == [["deep"]] and told["jobs"][0]["recomputed"]["operations"] > 0
    assert told["largest"]["jobs"][0]["recomputed"]["size"] > 256 > told["largest"]["jobs"][0]["size"]
    same = run("plan", deep_with(folder, "null"), "--memory", "1300kB", "--recompute", "auto").stdout
    assert lines(same)[-4:] == lines(shown)[-4:]
    unreachable = run("plan", deep_with(folder, "100kB"), "--memory", "1300kB").stdout
    assert "does not fit" in unreachable and "cannot be brought to its recompute=" in unreachable
    ended = run("plan", deep_with(folder, "auto", "memory: 1300kB\n"))
    assert ended.exit_code == 0 and "deep recomputes: " in ended.stdout and "together: deep" in ended.stdout
    ended = run("plan", deep_with(folder, "null", "memory: 1300kB\n"))
    assert ended.exit_code == 1 and "with recompute='auto' this one fits" in ended.stderr
    ended = run("plan", deep_with(folder, "auto", "memory: 700kB\n"))
    assert ended.exit_code == 1 and "recomputing brings the step to" in ended.stderr


def test_plan_tells_what_fits_and_what_waits(folder: Path):
    wide = PIECES.replace("sgd", "adamw")
    entries = [("a", 20_000), ("b", 20_000), ("c", 20_000), ("huge", 2_000_000)]
    text = "".join(f"- {{name: {name}, {wide}, args: {{width: {width}}}}}\n" for name, width in entries)
    path = config(folder, f"memory: 8MB\njobs:\n{text}- {{name: eager, {PIECES.replace('cross_entropy', 'code.py:looks')}}}")
    ended = run("plan", path, "--json", "--groups")
    assert ended.exit_code == 1  # huge does not fit
    (line,) = lines(ended.stderr.replace("user code talks", ""))
    assert "job 'huge' does not fit" in line and "raise memory=" in line
    report = json.loads(ended.stdout)
    jobs: dict[str, Any] = {job["name"]: job for job in report["jobs"]}
    assert report["together"] == ["a", "b"]
    assert jobs["c"]["verdict"].startswith("waits for memory")
    assert jobs["eager"]["opaque_reason"] and "runs eagerly" in jobs["eager"]["verdict"]
    assert jobs["a"]["predicted_peak_bytes"] == sum(jobs["a"][k] for k in ("persistent_bytes", "batch_bytes", "height_bytes"))
    assert jobs["a"]["groups"][-1]["end"] == jobs["a"]["operations"]
    shown = run("plan", path, "--groups").stdout
    assert "plan of a:" in shown and "allocation" in shown


# -- devices


@pytest.mark.parametrize("command", ["train", "study"])
def test_a_config_says_on_which_device(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str):
    """What is said is what is trained on; where the machine does not have it, that is said before anything is made."""
    trained: list[str] = []

    def stands_in(*_: Any, device: str = "cpu", **__: Any) -> Any:
        trained.append(device)
        raise SystemExit(0)

    monkeypatch.setattr("waterflow.train", stands_in)
    monkeypatch.setattr("waterflow.study.optimize", stands_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = {"train": JOB, "study": STUDY}[command]
    for line in ("", "device: cpu"):
        assert run(command, config(folder, f"{text}\n{line}\n")).exit_code == 0
    ended = run(command, config(folder, f"{text}\ndevice: cuda\n"))
    assert ended.exit_code == 2 and "cannot be used: this torch" in " ".join(ended.stderr.split())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cuda", "cuda:1"):
        assert run(command, config(folder, f"{text}\ndevice: {name}\n")).exit_code == 0
    ended = run(command, config(folder, f"{text}\ndevice: cuda:2\n"))
    assert ended.exit_code == 2 and "'cuda:2' of 2 GPU(s) on this machine" in " ".join(ended.stderr.split())
    assert trained == ["cpu", "cpu", "cuda", "cuda:1"]


# -- wrong configs

JOB = f"jobs: [{{{PIECES}}}]"
STUDY = "objective: code.py:objective\nn_trials: 1\n"
WRONG = [
    ("train", "epocs: 3\n" + JOB, "epocs: unknown key; did you mean 'epochs'?"),
    ("train", "epochs: 3", "jobs is missing"),
    ("train", "epochs: 0\n" + JOB, "epochs must be a positive whole number; got 0"),
    ("train", "epochs: [\n" + JOB, "not valid YAML"),
    ("train", "- 3", "must be a mapping"),
    ("train", "memory: 4 parsecs\n" + JOB, "memory: cannot read '4 parsecs'"),
    ("train", "jobs: [{name: a}]", "jobs[0].job: give job or model"),
    ("train", "jobs: [{job: code.py:job}, {job: code.py:job}]", "two jobs are called 'from-job'"),
    ("train", "jobs: [{job: code.py:jobb}]", "code.py has no function 'jobb'; did you mean 'job'?"),
    ("train", "jobs: [{job: cod.py:job}]", "jobs[0].job: there is no file"),
    ("train", "jobs: [{job: nothing.at.all:job}]", "jobs[0].job: cannot import nothing.at.all"),
    ("train", "jobs: [{job: code.py}]", "'path/to/file.py:function'; got 'code.py'"),
    ("train", "jobs: [{job: code.py:broken}]", "jobs[0].job failed: RuntimeError: no weights today"),
    ("train", "jobs: [{job: code.py:number}]", "jobs[0].job must name a function that returns a waterflow.Job"),
    ("train", "jobs: [{job: code.py:job, args: {widht: 3}}]", "jobs[0].args.widht: unknown key; did you mean 'width'?"),
    ("train", "jobs: [{job: code.py:job, loss: cross_entropy}]", "jobs[0].loss cannot stand beside job"),
    ("train", "epochs: 3\njobs: [{job: code.py:long}]", "config.yaml: epochs is 3, and code.py:long makes a job with epochs=50; keep one"),
    ("train", JOB.replace("cross_entropy", "cross_entrpy"), "did you mean 'cross_entropy'?"),
    ("train", JOB.replace("name: sgd", "name: sdg"), "jobs[0].optimizer.name must be one of"),
    ("train", JOB.replace("lr:", "rate:"), "jobs[0].optimizer.rate: unknown key"),
    ("train", JOB.replace("1e-2", "-1"), "jobs[0].optimizer: Invalid learning rate"),
    ("train", "objective: code.py:objective", "waterflow study"),
    ("study", JOB, "waterflow train"),
    ("study", "n_trials: 3", "objective: give objective or build"),
    ("study", "objective: code.py:objective", "n_trials: give n_trials, timeout or deadline"),
    ("study", STUDY + "direction: up", "direction must be one of minimize, maximize"),
    ("study", STUDY + "sampler: {name: tpe, sed: 1}", "sampler.sed: unknown key; did you mean 'seed'?"),
    ("study", STUDY + "pruner: mean", "pruner.name must be one of median"),
    ("study", STUDY + "max_concurrent: all", "max_concurrent must be"),
    ("study", STUDY + "mode: fastest", "mode must be one of auto, lanes, turns; got 'fastest'"),
    ("train", JOB + "\nexact: 0.5", "exact must be true or false; got 0.5"),
    ("train", JOB + "\ndevice: gpu", "device must be cpu, cuda, or a GPU by its number, as cuda:1; got 'gpu'"),
    ("train", JOB + "\ndevice: cuda:-1", "device must be cpu, cuda, or a GPU by its number, as cuda:1; got 'cuda:-1'"),
    ("study", STUDY + "device: 3", "device must be cpu, cuda, or a GPU by its number, as cuda:1; got 3"),
    ("study", STUDY + "deterministic: maybe", "deterministic must be true or false"),
    ("study", "objective: code.py:objective\ntimeout: -1", "timeout must be a positive number of seconds, or text like '90s',"),
    ("study", "objective: code.py:objective\ntimeout: -1", "'30min' or '2h'; got -1"),
    ("study", STUDY + "trial_timeout: 2 hurs", "trial_timeout must be a positive number of seconds, or text like '90s'"),
    ("train", JOB.replace("[{", "[{timeout: 1 parsec, "), "jobs[0].timeout must be a positive number of seconds, or text like"),
    ("plan", "objective: code.py:objective", "waterflow study"),
    ("train", "jobs: [3]", "jobs[0] must be a mapping of keys to values; got 3"),
    ("train", "jobs: [{model: code.py:model, epocs: 3}]", "jobs[0].epocs: unknown key; did you mean 'epochs'?"),
    ("train", "jobs: [{model: code.py:model}]", "jobs[0].data is missing; it must name a function, as 'module:function'"),
    ("train", "jobs: [{job: code.py:job, args: {1: 3}}]", "jobs[0].args must be a mapping of names to values; got {1: 3}"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "text", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_wrong_config(folder: Path, command: str, text: str, said: str):
    ended = run(command, config(folder, text))
    assert ended.exit_code == 2
    (line,) = lines(ended.stderr)
    assert said in line


def test_an_error_is_json_for_machines(folder: Path):
    ended = run("study", config(folder, "n_trials: 3"), "--json")
    assert ended.exit_code == 2 and "objective" in json.loads(ended.stdout)["error"]
