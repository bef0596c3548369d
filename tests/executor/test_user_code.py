"""Breaking off code of the user's: the order arrives, and leaves Python whole."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from waterflow.errors import JobCancelled
from waterflow.executor import cancel
from waterflow.executor.cancel import Turn, UserCode, break_off_all, doing, in_user_code, left_behind, where
from waterflow.partition.capture import trace


def started(code: UserCode, work: Callable[[], None]) -> tuple[threading.Thread, list[str]]:
    ends: list[str] = []

    def run() -> None:
        try:
            with code.here():
                work()
        except JobCancelled:
            ends.append("broken off")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ends


def test_a_thread_that_waits_for_torch_s_imports_is_broken_off_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel, "begin_import", Future[None])  # of an import that does not end
    code = UserCode()
    thread, ends = started(code, lambda: ends.append("it began"))
    break_off_all([code], [thread], 10.0)
    assert not thread.is_alive() and ends == ["broken off"]


@pytest.mark.slow
def test_a_thread_that_imports_is_broken_off_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next import of the module would wait for ever."""
    (tmp_path / "slow_to_import.py").write_text("import time\nfor _ in range(30):\n    time.sleep(0.01)\nloaded = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    code = UserCode()

    def work() -> None:
        importlib.import_module("slow_to_import")
        while True:
            time.sleep(0.01)

    thread, ends = started(code, work)
    while "slow_to_import" not in sys.modules:
        time.sleep(0.001)
    break_off_all([code], [thread], 10.0)
    assert not thread.is_alive() and ends == ["broken off"]
    assert importlib.import_module("slow_to_import").loaded


@pytest.mark.slow
def test_a_thread_that_captures_is_broken_off_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch ends the process where an exception comes out of some of the functions that a trace calls."""
    code, inside, through = UserCode(), threading.Event(), threading.Event()
    update = trace._StepTracer._update

    def slow(*given: Any) -> Any:
        inside.set()
        for _ in range(30):
            time.sleep(0.01)
        through.set()
        return update(*given)

    monkeypatch.setattr(trace._StepTracer, "_update", slow)

    def work() -> None:
        model = nn.Linear(4, 4)
        step = wf.Step(model, optimizer=torch.optim.SGD(model.parameters(), 0.1), step=lambda m, b: m(b).sum())
        while True:
            step(torch.ones(2, 4))

    thread, ends = started(code, work)
    assert inside.wait(60)
    break_off_all([code], [thread], 20.0)
    assert not thread.is_alive() and ends == ["broken off"] and through.is_set()


@pytest.mark.parametrize("interruptible", [None, True])
def test_our_code_says_itself_where_it_can_be_broken_off(interruptible: bool | None) -> None:
    """Whatever its file is called."""
    scope: dict[str, Any] = {}
    file = str(Path(wf.__file__).parent / "any_name.py")
    exec(compile("def ours(wait): wait()\ndef unmarked(wait): wait()\ndef counts():\n    yield", file, "exec"), scope)

    class Ours:
        wait = scope["ours"]
        manager = contextlib.contextmanager(scope["counts"])

    doing("counting", interruptible)(Ours)
    for name, expected in (
        ("ours", (interruptible is True, "counting")),
        ("unmarked", (False, "waiting for its turn, or for memory")),
    ):
        over = threading.Event()
        thread = threading.Thread(target=scope[name], args=(over.wait,), daemon=True)
        thread.start()
        while "wait" not in str(sys._current_frames()[thread.ident or 0]):
            time.sleep(0.001)
        assert (in_user_code(thread.ident or 0), where(thread.ident or 0)) == expected
        over.set()
        thread.join(10)
    assert contextlib.contextmanager(scope["counts"]).__code__ not in cancel._doing  # the library's own


@pytest.mark.parametrize("to_the_end", [False, True])
def test_our_code_says_itself_that_it_goes_on_to_the_end(to_the_end: bool) -> None:
    """With all that it calls, the user's code, too."""
    inside, over = threading.Event(), threading.Event()

    @doing("counting", interruptible=False if to_the_end else None)
    def ours(users: Callable[[], object]) -> None:
        users()

    thread = threading.Thread(target=ours, args=(lambda: inside.set() or over.wait(30),), daemon=True)
    thread.start()
    assert inside.wait(10)
    assert in_user_code(thread.ident or 0) is not to_the_end
    over.set()
    thread.join(10)


def test_what_was_broken_off_does_not_begin() -> None:
    code = UserCode()
    code.break_off()
    with pytest.raises(JobCancelled), code.here():
        pytest.fail("it began")


def test_who_collects_what_another_thread_left_waits_for_no_order() -> None:
    """As where an order arrives between the way in and the block."""
    code = UserCode()
    left = code.here()
    thread = threading.Thread(target=left.__enter__)
    thread.start()
    thread.join()
    code.break_off()
    left.gen.close()  # type: ignore[attr-defined]
    assert not code._inside


@pytest.mark.slow
def test_an_order_that_is_swallowed_is_given_again() -> None:
    code, swallowed = UserCode(), []
    entered = threading.Event()

    def work() -> None:
        while len(swallowed) < 2:
            try:
                entered.set()
                while True:
                    time.sleep(0.001)
            except Exception as error:
                swallowed.append(error)
        while True:
            time.sleep(0.001)

    thread, ends = started(code, work)
    entered.wait(10)
    break_off_all([code], [thread], 10.0)
    assert not thread.is_alive() and ends == ["broken off"] and len(swallowed) == 2


@pytest.mark.slow
def test_nobody_waits_longer_than_asked_for_a_thread_that_stays() -> None:
    code, leave = UserCode(), threading.Event()
    thread, ends = started(code, lambda: leave.wait(30) and None)
    began = time.monotonic()
    break_off_all([code], [thread], 0.3)
    assert thread.is_alive() and time.monotonic() - began < 5
    leave.set()
    thread.join(10)
    assert ends == ["broken off"]


@pytest.mark.slow
def test_a_lock_is_given_back_by_a_thread_that_is_broken_off_when_it_gets_it() -> None:
    lock, waiting = Turn(), threading.Event()
    ends: list[str] = []

    def wait() -> None:
        try:
            waiting.set()
            with lock:
                ends.append("got it")
        except JobCancelled:
            ends.append("broken off")
            over.wait(30)

    over = threading.Event()
    thread = threading.Thread(target=wait, daemon=True)
    with lock:
        thread.start()
        waiting.wait(10)
        time.sleep(0.02)
        # It waits for the lock, outside of the interpreter, and finds both when it comes back.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(JobCancelled))
    while not ends:
        time.sleep(0.01)
    again = threading.Thread(target=lambda: lock.__enter__(), daemon=True)
    again.start()
    again.join(10)
    assert not again.is_alive() and thread.is_alive() and ends == ["broken off"]
    over.set()
    with lock:  # from one that ended with it
        pass


def test_a_lock_of_a_thread_that_is_left_behind_goes_to_the_next() -> None:
    lock, holds, over = Turn(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            over.wait(30)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    holds.wait(10)
    left_behind.add(thread)
    with lock:
        assert thread.is_alive()
        over.set()  # it comes back, and gives nothing back that is another's
        thread.join(10)
        other = threading.Thread(target=lambda: lock.__enter__(), daemon=True)
        other.start()
        other.join(0.5)
        assert other.is_alive()
    other.join(10)
    assert not other.is_alive()


IMPORTING = """
import os, signal, sys, threading, time, torch, waterflow as wf
signal.signal(signal.SIGINT, signal.default_int_handler)
from torch.nn import functional as F
from tests.support import Net, images
def press():
    while sys.argv[1] not in sys.modules: time.sleep(0.001)
    time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press).start()
settings = dict(model=Net, data=images(2), optimizer=torch.optim.SGD, loss=F.cross_entropy)
try:
    wf.train([wf.Job("job", **settings)])
except KeyboardInterrupt:
    print("interrupted")
print(wf.train([wf.Job("job", **settings)])[0].status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch._dynamo", "waterflow.job", "waterflow.training.train"])
def test_ctrl_c_in_the_first_import_leaves_modules_whole(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTING, module], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "interrupted\ncompleted\n", done.stderr
