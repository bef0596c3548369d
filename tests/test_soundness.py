"""The command that runs a folder of scenarios notices what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import soundness

LINES = """\
one      equal captured
two      equal OPAQUE(because)
three    DIFFERS 2/4 ['.0'] captured
four     BOTHERR eager=E | wf=E captured
"""


def test_lines_are_read() -> None:
    lines = soundness.verdicts(LINES + "noise\n")
    assert list(lines) == ["one", "two", "three", "four"] and soundness.kept(lines) == {"one"}


@pytest.mark.parametrize(("lost", "wrong"), [(1, 0), (2, 1)])
def test_the_baseline_allows_one_in_twenty(tmp_path: Path, lost: int, wrong: int) -> None:
    before = {f"s{number}": f"s{number}  equal captured" for number in range(20)}
    (tmp_path / "before").write_text("\n".join(before.values()))
    now = {name: line if number >= lost else f"{name} equal OPAQUE()" for number, (name, line) in enumerate(before.items())}
    assert soundness.against([tmp_path / "before"], now)["wrong"] == wrong


def test_a_folder_of_scenarios(tmp_path: Path) -> None:
    (tmp_path / "scenarios_1.py").write_text(f"print({LINES!r})")
    (tmp_path / "scenarios_2.py").write_text("print('five equal captured'); raise SystemExit(3)")
    (tmp_path / "scenarios_3.py").write_text("")
    rows, lines = soundness.scenarios(tmp_path)
    assert [row["wrong"] for row in rows] == [1, 1, 1] and len(lines) == 5


def test_programs_that_went_wrong(tmp_path: Path) -> None:
    (tmp_path / "repro_neg_view_fft.py").write_text("print(-0.5, -0.5, None)")
    (tmp_path / "repro_loader_reads_model.py").write_text("print('DIFFERS', [1.0])")
    (tmp_path / "repro_nobody_knows.py").write_text("print('fine')")
    assert {row["what"]: row["wrong"] for row in soundness.repros(tmp_path)} == {
        "repro_loader_reads_model.py": 1, "repro_neg_view_fft.py": 0, "repro_nobody_knows.py": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("repro_crash_not_eager.py", "eager ok\ntensor(1.)\neager ok\ntensor(2.)", "eager ok\nTypeError x\neager ok\ntensor(2.)"),
        (
            "repro_job_forces_train_mode.py",
            "[1.5] [1.5]\nbatches BatchNorm: 0\n[1.5]",
            "[1.5] [1.5]\nbatches BatchNorm: 4\n[1.5]",
        ),
        (
            "repro_lru_cache_fake.py",
            "0.5 None <class 'torch.Tensor'>\nevaluate: tensor(1.)",
            "<class 'FakeTensor'>\nevaluate: tensor(1.)",
        ),
        ("repro_opaque_leftover_grads.py", "captured True opaque True 0.0", "captured True opaque False 0.1"),
        ("repro_other_trials_capture.py", "a 1.0 0.1 (second\n" * 4, "a 1.0 1.0 (second\n" * 4),
        ("repro_stride_ln2d.py", "1 4 2 []\n" * 6, "1 4 2 []\n" * 5 + "1 4 2 ['c.bias']"),
    ],
)
def test_what_they_must_print(name: str, right: str, wrong: str) -> None:
    assert soundness.REPROS[name](right) and not soundness.REPROS[name](wrong)
