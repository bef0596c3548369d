"""Which modules go with a job, and that finding them costs little."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

from waterflow.cluster import hand_in
from waterflow.partition.guards.code_refs import is_library_module


def oracle() -> set[str]:
    """The rule, a module at a time, without a thought of speed."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    roots = {Path.cwd().resolve()} | ({Path(script).resolve().parent} if script else set())
    chosen = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.split(".")[0] in {"waterflow", "__main__", "__mp_main__"} | sys.stdlib_module_names:
            continue
        path = Path(file)
        own = any(path.is_relative_to(root) for root in roots) or name == file
        registered = sys.modules.get(module.__name__) is module
        if own and not is_library_module(name.partition(".")[0]) and path.suffix == ".py" and registered:
            chosen.add(module.__name__)
    return chosen


def sent() -> set[str]:
    """The modules that are sent by value while something is packed."""
    with hand_in._own_modules_by_value():
        return cloudpickle.list_registry_pickle_by_value()


def module(monkeypatch: pytest.MonkeyPatch, name: str, file: str | None, called: str | None = None) -> None:
    made = ModuleType(called or name)
    made.__file__ = file
    monkeypatch.setitem(sys.modules, name, made)


def test_what_goes_with_a_job_follows_from_where_its_modules_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, beside, script = tmp_path / "here", tmp_path / "here-too", tmp_path / "scripts"
    for folder in (here, beside, script):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script / "main.py"), raising=False)
    files = {
        "wf_own": f"{here}/wf_own.py", "wf_pack": f"{here}/wf_pack/__init__.py", "wf_pack.part": f"{here}/wf_pack/part.py",
        "wf_beside": f"{beside}/wf_beside.py", "wf_script": f"{script}/wf_script.py", "wf_dots": f"{tmp_path}/./here/a.py",
        "wf_slashes": f"{tmp_path}//here/a.py", "wf_up": f"{here}/../b.py", "wf_into": f"{beside}/../here/c.py",
        "wf_relative": "wf_relative.py", "wf_built": f"{here}/wf_built.so", "wf_none": None, "wf_two": f"/{here}/d.py",
        f"{beside}/e.py": f"{beside}/e.py", "numpy.wf": f"{here}/numpy/wf.py", "json.wf": f"{here}/json/wf.py",
    }  # fmt: skip
    for name, file in files.items():
        module(monkeypatch, name, file)
    module(monkeypatch, "wf_alias", f"{here}/wf_alias.py", called="wf_another")
    assert sent() == oracle()
    assert {name for name in sent() if name in files} == {
        "wf_own", "wf_pack", "wf_pack.part", "wf_script", "wf_dots", "wf_slashes", "wf_up", f"{beside}/e.py",
    }  # fmt: skip


def test_what_changes_is_seen_at_the_next_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sent()
    module(monkeypatch, "wf_later", f"{tmp_path}/wf_later.py")
    assert sent() == before | {"wf_later"} == oracle()
    sys.modules["wf_later"].__file__ = "/elsewhere/wf_later.py"
    assert "wf_later" not in sent() and sent() == oracle()
    sys.modules["wf_later"].__file__ = f"{tmp_path}/wf_later.py"
    module(monkeypatch, "wf_later", f"{tmp_path}/wf_later.so")  # another one of this name
    assert "wf_later" not in sent() and sent() == oracle()
    (tmp_path / "deeper").mkdir()
    module(monkeypatch, "wf_later", f"{tmp_path}/wf_later.py")
    monkeypatch.chdir(tmp_path / "deeper")
    assert "wf_later" not in sent() and sent() == oracle()


def test_thousands_of_modules_cost_a_submission_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has thousands. Nothing is made of those that lie elsewhere, and no file is looked at for them."""
    monkeypatch.chdir(tmp_path)
    for number in range(5000):
        module(monkeypatch, f"wf_far.part{number}", f"/elsewhere/wf_far/part{number}.py")
        module(monkeypatch, f"numpy.wf{number}", f"{tmp_path}/.venv/numpy/wf{number}.py")
    made: list[object] = []

    class Counted(type(Path())):  # type: ignore[misc]
        def __new__(cls, *given: object) -> Path:
            made.append(given)
            return super().__new__(cls, *given)

    sent()
    monkeypatch.setattr(hand_in, "Path", Counted)
    assert sent() == oracle()
    assert len(made) < 100
