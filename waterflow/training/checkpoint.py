"""Checkpoints: a job's whole state between two steps, in host memory and in files."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import tempfile
import zlib
from collections import Counter, OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch

from waterflow.errors import CheckpointError

FORMAT = 1
# The end of a file: checksum of all before it, bytes of the description that stands before it, and a mark.
_END = struct.Struct("<IQ8s")
_MARK = b"wf-state"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The whole state of one job between two steps.

    ``JobRunner(job, engine, resume=checkpoint)`` resumes it, in this process or in another one that makes the same job, and
    ends with the bits (losses, metrics, parameters, buffers, optimizer state) of an uninterrupted run, if the job's data has
    ``state_dict`` and ``load_state_dict``, or follows from the job's seed. The checkpoint has its own copies of all tensors, in
    host memory; do not change them.

    Data with a ``state_dict`` is trusted to know its position (torchdata's loaders do, except random transforms in their
    workers). Other data is read again from the beginning of the epoch up to the position, which takes as long as reading does.

    A job of a GPU can go on on the CPU, and the other way round, with other bits.

    Not included: attributes of objects beside parameters, buffers and ``get_extra_state``, such as a data set's own state, and
    the random numbers of Python and NumPy. If steps may round differently from run to run (``exact=False``), resumed ones may.

    ``epoch`` counts completed epochs, ``batch`` the steps of the next one, ``steps`` all steps.
    """

    job: str
    epoch: int
    batch: int
    steps: int
    state: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in _tensors(self.state))

    def save(self, path: str | os.PathLike[str], *, durable: bool = True) -> None:
        """Write a file: all of it, or nothing if this is interrupted or fails.

        With ``durable`` the file is on the disk when this returns; without, it may be lost if the machine stops, which is
        enough for another process to read it. Raises OSError, and CheckpointError for state that is not plain data.
        """
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        write(path, content, {"job": self.job, "steps": self.steps}, durable=durable)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, job: str | None = None, any_torch: bool = False) -> Checkpoint:
        """Read a file that ``save`` wrote. Runs no code from the file, so it may come from an untrusted source.

        Tensors stay in the file until they are used. ``any_torch`` accepts a file of another version of torch; bits may then
        differ from here on. Raises CheckpointError for a file that is no checkpoint, is damaged, of another version, or not of
        ``job``.
        """
        content = read(path, job=job, any_torch=any_torch)
        if content.keys() != {field.name for field in fields(cls)}:
            raise CheckpointError(f"{path} holds no state to go on from, but {', '.join(sorted(content))}")
        return cls(**content)


def write(path: str | os.PathLike[str], content: dict[str, Any], about: dict[str, Any], *, durable: bool = True) -> None:
    """Write plain data and tensors, with a description, as a whole file or not at all. Raises OSError, CheckpointError."""
    path = Path(path)
    told = json.dumps({"format": FORMAT, "torch": _torch(), **about}).encode()
    _check_plain(content, "")
    # A hidden file in the same folder: os.replace is atomic only within a file system.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w+b") as file:
            through = _Through(file)
            torch.save(content, through)
            if through.error is not None:
                raise through.error
            file.write(told)
            file.flush()
            file.write(_END.pack(_checksum(file.fileno()), len(told), _MARK))
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    if durable:
        # The name is in the folder: without this the file could be on the disk without a name.
        _sync_folder(path.parent)


class _Through:
    """Passes torch's writes on to a file and keeps the first error, which torch would replace by its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write ``data``; after an error nothing is written."""
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing: the file's owner flushes it."""


def read(path: str | os.PathLike[str], *, job: str | None = None, any_torch: bool = False) -> dict[str, Any]:
    """Return the content that ``write`` wrote. Raises CheckpointError, OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _END.size:
            raise CheckpointError(f"{path} is no checkpoint: it has {size} bytes. {_REMEDY}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as given:
            # The mark is written last: a file that was cut off has none. The checksum finds the rest.
            checksum, length, mark = _END.unpack(given[-_END.size :])
            if mark != _MARK:
                raise CheckpointError(f"{path} is no checkpoint, or its end is missing. {_REMEDY}")
            with memoryview(given) as whole, whole[: -_END.size] as checked:
                if zlib.crc32(checked) != checksum or length > len(checked):
                    raise CheckpointError(f"{path} is damaged: its checksum is not the one that it was written with. {_REMEDY}")
                told = json.loads(bytes(checked[len(checked) - length :]))
    if told["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {told['format']}, and this version of waterflow reads format {FORMAT}; go on with the version "
            "that wrote it, or start the job anew"
        )
    if told["torch"] != _torch() and not any_torch:
        raise CheckpointError(
            f"{path} was written with torch {told['torch']}, and this is {_torch()}, whose results may differ; install the "
            "other one, or load it with any_torch=True"
        )
    if job is not None and told.get("job") != job:
        raise CheckpointError(f"{path} is of job {told.get('job')!r}, not of {job!r}; give that job's file, or start anew")
    try:
        # weights_only: the unpickler runs no code. mmap: a checkpoint may be larger than free memory.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whole, but not by us
        raise CheckpointError(f"{path} cannot be read: {error}. {_REMEDY}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}. {_REMEDY}")
    return content


_PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device)
_REMEDY = "Take an older checkpoint, or start the job anew"


def _checksum(file: int) -> int:
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as whole:
        return zlib.crc32(whole)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _torch() -> str:
    return torch.__version__.split("+")[0]


def _check_plain(value: Any, where: str) -> None:
    # Exact types: a subclass may need code of its own to be read, which weights_only refuses. Better to fail now than
    # when the job is to be resumed.
    if type(value) in (dict, OrderedDict, Counter):
        for key, entry in value.items():
            _check_plain(key, where)
            _check_plain(entry, f"{where}.{key}" if where else str(key))
    elif type(value) in (list, tuple, set):
        for entry in value:
            _check_plain(entry, where)
    elif type(value) not in _PLAIN:
        raise CheckpointError(
            f"a {type(value).__module__}.{type(value).__name__} in {where} cannot be written: files hold tensors and plain data "
            "alone (numbers, text, lists, dicts), which run no code when they are read. Return such from state_dict()"
        )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for entry in entries for tensor in _tensors(entry)]
