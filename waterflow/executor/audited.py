"""What audits have found: which captured steps they have looked at, and code whose captures have ended in this process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

from waterflow.errors import CaptureError


@dataclass(eq=False)
class Code:
    """Steps of one structure, whatever their batches. ``fault`` tells how their captured form differed from the eager one."""

    fault: str = ""
    told: set[str] = field(default_factory=set)  # why audits of it proved nothing

    def check(self) -> None:
        """Raise Faulty where captured steps of this code are not to run any more."""
        if self.fault:
            raise Faulty(self)


class Faulty(CaptureError):
    """The code's captured steps have differed from its eager ones."""

    def __init__(self, code: Code) -> None:
        self.code = code
        super().__init__(f"an audit found that the captured step is not the eager one: {code.fault}")


class _Codes:
    """Codes by structure, as long as somebody has them; those with a fault stay. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: weakref.WeakValueDictionary[Hashable, Code] = weakref.WeakValueDictionary()
        self._faulty: list[Code] = []

    def of(self, structure: Hashable) -> Code:
        """The one code of this structure."""
        with self._lock:
            code = self._codes.get(structure)
            if code is None:
                code = self._codes[structure] = Code()
            return code

    def end(self, code: Code, fault: str) -> bool:
        """From now on steps of this code run eagerly; whether nobody has said so before."""
        with self._lock:
            if code.fault:
                return False
            code.fault = fault
            self._faulty.append(code)
            return True


codes = _Codes()


@dataclass(eq=False)
class Audited:
    """The audits of one captured step, which jobs share: its first step, and one at a later place of a job."""

    later: int = 0  # a job's step; 0 before the first audit, -1 behind the second one
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begins(self) -> bool:
        """Whether nobody has begun the first audit; the caller then does."""
        with self._lock:
            if self.later:
                return False
            self.later = 1 << 62
            return True

    def ends(self, step: int) -> bool:
        """Whether a job's step is at the later place, or behind it, and nobody has begun that audit; the caller then does."""
        with self._lock:
            if not 0 < self.later <= step:
                return False
            self.later = -1
            return True
