"""The parts of the GPU check that need no GPU: cases, time limits, the gate, and what is written down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import DONE, FAILED, MARK, NO_TIME, NOT_MEASURED, NOT_RUN, STOPPED, Case, Outcome, Part

pytestmark = pytest.mark.slow
found_there = gpu_check.tests  # which other tests leave out


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def ran(code: str, *owes: str, seconds: float = 20) -> Outcome:
    end = time.monotonic() + seconds
    return gpu_check.run(1, Case("mine", python(code), owes), lambda: end - time.monotonic())


def good(part: int, case: Case, left: Callable[[], float], most_log: int | None) -> Outcome:
    return Outcome(part, case.name, DONE, 1.0, dict.fromkeys(case.owes, True))


def check(folder: Path, runner: object, *arguments: str) -> tuple[int, dict[tuple[int, str], dict], dict]:
    status = gpu_check.main(["--out", str(folder), *arguments], runner)  # type: ignore[arg-type]
    document = json.loads((folder / "gpu_check.json").read_text())
    return status, {(one["part"], one["case"]): one for one in document["cases"]}, document


@pytest.fixture(autouse=True)
def few_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "tests", lambda: [Case("test_streams.py::test_one", ())])


# -- one case


def test_figures_are_those_of_the_last_line_that_says_them() -> None:
    lines = [{"a": 1, "b": True}, {"a": 2}]
    done = ran("\n".join(f"print({MARK + json.dumps(line)!r})" for line in lines), "a", "b")
    assert (done.status, done.figures, done.reason) == (DONE, {"a": 2, "b": True}, "")


@pytest.mark.parametrize(
    "code, status, reason",
    [
        ("raise SystemExit(3)", FAILED, "exit status 3"),
        ("import os; os.abort()", FAILED, "it died of signal 6"),
        ("pass", FAILED, "it did not print a"),
        (f"print('{MARK}' + '[not json')", FAILED, "its figures cannot be read"),
        (f"print('{MARK}' + '{{\"a\": false}}')", FAILED, "wrong: a"),
        (f"print('{MARK}' + '{{\"a\": 1, \"graphs_launched\": 0}}')", FAILED, "wrong: graphs_launched"),
    ],
)
def test_a_case_that_owes_something_has_failed(code: str, status: str, reason: str) -> None:
    done = ran(code, "a")
    assert done.status == status and reason in done.reason


def test_a_case_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """Whether it hangs or leaves a process behind, which would hold the GPU, and what it prints to."""
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys, os, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    code += f"while not os.path.exists({str(tmp_path / 'child')!r}): time.sleep(0.01)\nprint('begun', flush=True)\n"
    for more, status in (("", DONE), ("time.sleep(600)", STOPPED)):
        done = ran(code + more, seconds=10 if not more else 4)
        assert done.status == status and "begun" in done.log
        child_id = int((tmp_path / "child").read_text())
        with pytest.raises(ProcessLookupError):
            for _ in range(1000):
                os.kill(child_id, 0)
                os.sched_yield()
                if Path(f"/proc/{child_id}/stat").read_text().split()[2] == "Z":  # nobody waits for it here
                    raise ProcessLookupError
        (tmp_path / "child").unlink()


def test_every_test_that_a_part_names_is_there() -> None:
    there = [case.name for case in found_there()]
    assert len(there) > 50 and there[0].startswith("test_captures.py::")
    named = [word for part in gpu_check.parts() if part.number != 3 for case in part.cases() for word in case.command]
    wanted = [word for word in named if word.startswith("tests/gpu/")]
    told = subprocess.run(gpu_check.test("", "--collect-only"), cwd=gpu_check.ROOT, capture_output=True, text=True).stdout
    assert wanted and set(wanted) <= {line.strip() for line in told.splitlines()}


def test_a_part_without_tests_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 4, "no tests collected", ""))
    [case] = found_there()
    assert case.owes == ("tests",)


def test_what_was_carried_along_can_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "carried_package.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert ran("import carried_package, waterflow").status == DONE


# -- all of them


def test_all_good(tmp_path: Path) -> None:
    status, cases, document = check(tmp_path, good)
    assert status == 0 and document["gate"] == "open" and {number for number, _ in cases} == set(range(1, 10))
    text = (tmp_path / "gpu_check.md").read_text()
    assert NOT_MEASURED not in text and "| 6 several jobs, timed | 8 jobs | done |" in text


def test_the_limits_fit_into_nine_minutes() -> None:
    assert sum(part.limit for part in gpu_check.parts() if part.number < 10) <= gpu_check.SECONDS < 570


@pytest.mark.parametrize("bad", [(1, "card"), (2, "mlp"), (4, "memory")])
def test_a_truth_that_is_none_closes_the_gate(tmp_path: Path, bad: tuple[int, str]) -> None:
    def runner(part: int, case: Case, left: Callable[[], float], most_log: int | None) -> Outcome:
        if (part, case.name) == bad:
            return Outcome(part, case.name, FAILED, 1.0, reason="wrong: bits")
        return good(part, case, left, most_log)

    status, cases, document = check(tmp_path, runner)
    assert status == 1 and document["gate"] == f"part {bad[0]} has failed: {bad[1]}: wrong: bits"
    later = {number: one["status"] for (number, _), one in cases.items() if number > bad[0]}
    assert set(later.values()) == {NOT_RUN} and set(later) == set(range(bad[0] + 1, 10))


def test_what_is_under_way_when_the_gate_closes_ends_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "TO_END", 0.5)
    cases = [
        Case("bad", python("raise SystemExit(1)")),
        Case("hangs", python("import time; time.sleep(600)")),
        Case("late", python("")),
    ]
    monkeypatch.setattr(gpu_check, "parts", lambda: [Part(1, "one", lambda: cases, 60, 2, gate=lambda case: case == "bad")])
    _, found, _ = check(tmp_path, gpu_check.run)
    assert [found[1, name]["status"] for name in ("bad", "hangs", "late")] == [FAILED, STOPPED, NOT_RUN]


def test_bits_that_are_wrong_elsewhere_only_leave_out_what_stands_on_them(tmp_path: Path) -> None:
    def runner(part: int, case: Case, left: Callable[[], float], most_log: int | None) -> Outcome:
        if (part, case.name) == (2, "attention bf16"):
            return Outcome(part, case.name, FAILED, 1.0, reason="wrong: as_torch")
        return good(part, case, left, most_log)

    status, cases, document = check(tmp_path, runner)
    assert status == 1 and document["gate"] == "open"
    assert [key for key, one in cases.items() if one["status"] == NOT_RUN] == [(5, "bert bf16")]


def test_parts_share_the_time_that_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [Case(str(number), python("import time; time.sleep(600)")) for number in range(2)]
    made = [Part(5, "slow", lambda: slow, 1.5), Part(6, "slow", lambda: slow, 600)]
    monkeypatch.setattr(gpu_check, "parts", lambda: made)
    _, cases, _ = check(tmp_path, gpu_check.run, "--seconds", "4")
    assert [one["status"] for one in cases.values()] == [STOPPED, NO_TIME, STOPPED, NO_TIME]


def test_what_failed_is_run_again_with_whole_logs(tmp_path: Path) -> None:
    logs: list[int | None] = []

    def runner(part: int, case: Case, left: Callable[[], float], most_log: int | None) -> Outcome:
        logs.append(most_log)
        return good(part, case, left, most_log) if part != 4 else Outcome(part, case.name, FAILED, 1.0, reason="wrong")

    check(tmp_path, runner)
    status, cases, _ = check(tmp_path / "again", good, "--again", str(tmp_path / "gpu_check.json"))
    assert status == 0 and {number for number, _ in cases} == {4, 5, 6, 7, 8, 9}
    assert logs[0] == gpu_check.MOST_LOG
    assert set(check(tmp_path / "only", good, "--only", "1", "10")[1]) == {
        (1, "card"), (1, "one page, two addresses"), (10, "memcheck"), (10, "host time"),
    }  # fmt: skip


@pytest.mark.parametrize("after", range(1, 11))
def test_killed_at_any_moment_the_files_are_whole(tmp_path: Path, after: int) -> None:
    """With all parts that were over by then."""
    code = (
        "import sys, time\nfrom benchmarks import gpu_check as g\n"
        "case = lambda n: g.Case(f'case {n}', ())\n"
        "g.parts = lambda: [g.Part(n, 'x', lambda n=n: [case(n)], 60) for n in range(1, 40)]\n"
        "def run(part, case, left, log):\n    print('part', part, flush=True)\n"
        "    return g.Outcome(part, case.name, g.DONE, log='x' * 100000)\n"
        f"g.main(['--out', {str(tmp_path)!r}, '--only', *map(str, range(1, 40))], run)"
    )
    process = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True, cwd=gpu_check.ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        if line == f"part {after + 1}\n":
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    assert len(document["cases"]) >= after
    assert f"case {after}" in (tmp_path / "gpu_check.md").read_text() and f"case {after}" in (tmp_path / "log.txt").read_text()


def test_without_a_gpu_it_is_told_as_such(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, cases, document = check(tmp_path, gpu_check.run)
    card = cases[1, "card"]
    assert status == 1 and card["status"] == FAILED and set(card["figures"].values()) == {NOT_MEASURED}
    assert "part 1 has failed" in document["gate"] and "CUDA" in (tmp_path / "log.txt").read_text()
