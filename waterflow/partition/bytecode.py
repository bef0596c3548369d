"""What the observer sees of a code object, instruction by instruction: where operands lie, and where the result will lie.

Depths of the stack follow from the bytecode alone, so that a frame need not say them.
"""

from __future__ import annotations

import dis
import inspect
import opcode as tables
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from waterflow.partition.opcodes import CELL_OPCODES, RULES, Kind, Take, treatment

# One for each instruction that is seen: number of its first code unit, kind, take, slots, constant, the unit that follows
# and the slot of its result there, the same for its jump. Slots count from the frame's first local variable.
Step = tuple[int, Kind, int, tuple[int, ...], Any, int, int, int, int]


class Plan(NamedTuple):
    """What the observer sees of a code object. Lists have an entry for each code unit."""

    steps: tuple[Step, ...]
    starts: list[int]  # the first unit of the instruction that a unit belongs to
    depths: list[int]  # of the stack before it; -1 where nothing leads
    handlers: tuple[int, ...]
    cells: tuple[int, ...]  # slots of the cells that a frame of it makes for itself


@dataclass(frozen=True)
class _Instruction:
    unit: int  # of the first prefix
    last: int  # of the opcode itself
    name: str
    opcode: int
    argument: int
    after: int

    @property
    def target(self) -> int | None:
        """Where it may jump."""
        if self.opcode not in _JUMPS:
            return None
        return self.after - self.argument if "JUMP_BACKWARD" in self.name else self.after + self.argument

    def effect(self, jump: bool) -> int:
        """By how much the stack grows."""
        if not _NEW and self.name in ("PRECALL", "CALL"):  # the compiler's account has the arguments go one step early
            return 0 if self.name == "PRECALL" else -self.argument - 1
        return dis.stack_effect(self.opcode, self.argument if self.opcode in _WITH_ARGUMENT else None, jump=jump)


_JUMPS = frozenset(dis.hasjrel)
_LEAVING = frozenset({
    "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE",
})  # fmt: skip
_NEW = sys.version_info >= (3, 12)
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_WITH_ARGUMENT: Any = frozenset(tables.hasarg if _NEW else range(dis.HAVE_ARGUMENT, 256))  # type: ignore[attr-defined]


def _caches(opcode: int) -> int:
    entries: Any = tables._inline_cache_entries  # type: ignore[attr-defined]
    return entries.get(dis.opname[opcode], 0) if isinstance(entries, dict) else entries[opcode]


def _instructions(code: types.CodeType) -> Iterator[_Instruction]:
    raw = code.co_code
    first, argument, unit = 0, 0, 0
    while 2 * unit < len(raw):
        opcode = raw[2 * unit]
        argument = argument << 8 | raw[2 * unit + 1]
        if opcode == dis.EXTENDED_ARG:
            unit += 1
            continue
        after = unit + 1 + _caches(opcode)
        yield _Instruction(first, unit, dis.opname[opcode], opcode, argument, after)
        first, argument, unit = after, 0, after


def _depths(code: types.CodeType, found: dict[int, _Instruction]) -> dict[int, int]:
    starts_deep = code.co_flags & _GENERATORS and dis.stack_effect(dis.opmap["RETURN_GENERATOR"]) == 0
    reached = {0: 1 if starts_deep else 0}
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        reached[entry.target // 2] = entry.depth + entry.lasti + 1
    waiting = list(reached)
    while waiting:
        at = found[waiting.pop()]
        ways = [] if at.name in _LEAVING else [(at.after, at.effect(False))]
        if at.target is not None:
            ways.append((at.target, at.effect(True)))
        for unit, effect in ways:
            if unit in found and unit not in reached:
                reached[unit] = reached[at.unit] + effect
                waiting.append(unit)
    return reached


# -- plans


def plan_of(code: types.CodeType, variables: int) -> Plan:
    """The plan of a code object whose frames have that many variables, cells included, below their stack."""
    instructions = list(_instructions(code))
    by_unit = {instruction.unit: instruction for instruction in instructions}
    depths = _depths(code, by_unit)
    steps: list[Step] = []
    names: tuple[str, ...] | None = None
    starts: list[int] = []
    began: int | None = None
    for at in instructions:
        starts += [at.unit] * (at.after - at.unit)
        if at.name == "RESUME" and began is None:
            began = at.unit
        if at.name == "KW_NAMES":
            names = code.co_consts[at.argument]
        elif at.unit in depths and treatment(at.name) != "harmless":
            step = _step(code, at, depths, variables, names)
            if step is not None:
                steps.append(step)
            names = None if at.name == "CALL" else names
    handlers = tuple(entry.target // 2 for entry in dis._parse_exception_table(code))  # type: ignore[attr-defined]
    made = (at for at in instructions if at.name == "MAKE_CELL" and at.unit < (began or 0))
    listed = [depths.get(unit, -1) for unit in starts]
    return Plan(tuple(steps), starts, listed, handlers, tuple(at.argument for at in made))


def _step(
    code: types.CodeType, at: _Instruction, depths: dict[int, int], variables: int, names: tuple[str, ...] | None
) -> Step | None:
    where = at.last if _NEW else at.unit  # later versions tell of an opcode itself, 3.11 of its first prefix alone
    rule = RULES.get(at.name)
    if rule is None:
        return (where, Kind.UNKNOWN, Take.SLOTS, (), at.name, -1, -1, -1, -1)
    depth = variables + depths[at.unit]
    positions = rule.operands(at.argument) if callable(rule.operands) else rule.operands
    slots = tuple(depth - position for position in positions)
    if at.name in CELL_OPCODES:
        if at.name != "MAKE_CELL" and at.argument < variables - len(code.co_freevars):
            return None  # a variable of the frame's own
        slots = (at.argument, *slots) if at.name != "MAKE_CELL" else ()
    if rule.take == Take.UNLESS_PLAIN and not slots:
        return None  # an empty set or dict
    constant = rule.constant(code, at.argument) if rule.constant else names if rule.kind is Kind.CALL else None
    after, result, jump, other = -1, -1, -1, -1
    if rule.result and at.after in depths:
        after, result = at.after, variables + depths[at.after] - (2 if rule.pair(at.argument) else 1)
    if at.name == "MAKE_CELL":
        result = at.argument
    if rule.jumps and at.target in depths:
        jump, other = at.target, variables + depths[at.target] - 1
    return (where, rule.kind, rule.take, slots, constant, after, result, jump, other)
