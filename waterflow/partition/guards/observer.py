"""Plans for the observer: for each instruction of a code object, the operands on the value stack, and the result.

Every opcode is in one of three tables: seen, harmless (it touches only the frame's own variables and stack), or absent
from compiled code. A test compares them with the interpreter's own list; an opcode that is in no table is recorded as
unknown.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import linecache
import opcode as tables
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from waterflow import _C

_NEW = sys.version_info >= (3, 12)
_NEWER = sys.version_info >= (3, 13)


class Kind(enum.IntEnum):
    """The kind of an event, and its operands. A result exists if the instruction made one and did not raise.

    Arithmetic, comparisons, formats and tests of nothing but numbers, strings, bytes and None are not recorded.
    """

    ENTER = 0  # a frame begins or goes on: (function); the code is the event's own
    CELLS = 1  # the cells that the frame itself made, before its first instruction: cells
    UNKNOWN = 2  # an instruction that is not known: (its name)
    ATTRIBUTE = 3  # (object, name) -> value; of a method call, the function or method
    SET_ATTRIBUTE = 4  # (object, name, value)
    DELETE_ATTRIBUTE = 5  # (object, name)
    SUPER = 6  # (self, name, class, super) -> value
    ITEM = 7  # (container, key) -> value
    SET_ITEM = 8  # (container, key, value)
    DELETE_ITEM = 9  # (container, key)
    SLICE = 10  # (container, start, stop) -> value
    SET_SLICE = 11  # (container, start, stop, value)
    GLOBAL = 12  # (the dict that has it: globals or builtins, name) -> value
    SET_GLOBAL = 13  # (globals, name, value)
    DELETE_GLOBAL = 14  # (globals, name)
    NAME = 15  # of a class body or of exec: (the namespace that has it, name) -> value
    SET_NAME = 16  # (namespace, name, value)
    DELETE_NAME = 17  # (namespace, name)
    DEREF = 18  # of an outer function's variable: (cell, name) -> value; in class bodies (cell, name, namespace)
    SET_DEREF = 19  # (cell, name, value)
    DELETE_DEREF = 20  # (cell, name)
    CELL = 21  # a frame makes a cell for a variable of its own: () -> cell
    ITERATE = 22  # iter(object): (object) -> iterator
    NEXT = 23  # next(iterator): (iterator) -> value, unless it is exhausted
    SEND = 24  # (receiver, value) -> what it yields or returns
    AWAIT = 25  # (object) -> awaitable
    LENGTH = 26  # (object) -> number
    UNPACK = 27  # (object, opcode's argument)
    CONTAINS = 28  # (container, value)
    COMPARE = 29  # (left, operator, right) -> value
    BINARY = 30  # (left, operator, right) -> value; in place where the operator ends on "="
    UNARY = 31  # (operand, operator) -> value
    TEST = 32  # the truth of something: (object)
    CALL = 33  # (callable, arguments, names of the last of them) -> value; bound methods are taken apart
    CALL_UNPACKED = 34  # f(*a, **k): (callable, a, k or None) -> value; bound methods are taken apart: (f, a, k, self)
    EXTEND = 35  # what a list, set or dict that is being made takes over: (iterable or mapping, opcode's name)
    HASH = 36  # keys of a set or dict that is being made: keys
    FORMAT = 37  # (object, conversion), or (object, conversion, specification) -> text
    WITH = 38  # (manager) -> what __enter__ returned
    LEAVE = 39  # an exception passes a with statement: (__exit__, exception) -> value
    IMPORT = 40  # (level, name, names) -> module
    IMPORT_FROM = 41  # (module, name) -> value; of "*" no value
    RAISE = 42  # what is raised, and from what
    EXCEPT = 43  # (exception, type that it is compared with)
    MATCH = 44  # (object, opcode's name, ...) -> value
    FUNCTION = 45  # a function is made: (code) -> function
    BUILD_CLASS = 46  # the class statement's own function: () -> function
    INTRINSIC = 47  # (operand, name) or (operand, name, operand) -> value
    DISPLAY = 48  # sys.displayhook: (object)
    IDENTITY = 49  # left is right: (left, right), of which none is None, a bool, ... or a class


class Take(enum.IntEnum):
    """The way in which operands are collected; ``csrc/observer.h`` has the same numbers."""

    SLOTS = 0
    UNLESS_PLAIN = 1  # not recorded where all are numbers, strings, bytes or None
    GLOBALS = 2  # the globals come first
    FIND_GLOBAL = 3  # the dict that has the name comes first: globals or builtins
    NAMESPACE = 4  # the frame's namespace comes first
    FIND_NAME = 5  # the dict that has the name comes first: the namespace, globals or builtins
    CELL_AND_NAMESPACE = 6  # the frame's namespace comes last
    CALL = 7
    CALL_NAMES = 8  # as a call; the last slot has the names of keyword arguments
    CALL_UNPACKED = 9
    UNLESS_ONE_ALONE = 10  # not recorded where one is None, a bool, ... or a class


@dataclass(frozen=True)
class Rule:
    """An opcode that is seen. Operands count from the top of the stack, 1; ``constant`` comes second, or first if alone."""

    kind: Kind
    operands: tuple[int, ...] | Callable[[int], tuple[int, ...]] = ()
    take: Take = Take.SLOTS
    constant: Callable[[types.CodeType, int], Any] | None = None
    result: bool = False
    pair: Callable[[int], bool] = lambda argument: False  # two are pushed: something and NULL, or a method and its self
    jumps: bool = False  # a result is there after the jump, too


def _name(shift: int) -> Callable[[types.CodeType, int], Any]:
    return lambda code, argument: code.co_names[argument >> shift]


def _variable(code: types.CodeType, argument: int) -> str:
    return code._varname_from_oparg(argument)  # type: ignore[attr-defined]


def _operator(code: types.CodeType, argument: int) -> str:
    return dis._nb_ops[argument][1]  # type: ignore[attr-defined]


def _comparison(code: types.CodeType, argument: int) -> str:
    return dis.cmp_op[argument >> (5 if _NEWER else 4 if _NEW else 0)]


def _own(name: str) -> Callable[[types.CodeType, int], Any]:
    return lambda code, argument: name


def _intrinsic(operands: int) -> Callable[[types.CodeType, int], Any]:
    return lambda code, argument: getattr(tables, f"_intrinsic_{operands}_descs")[argument]


def _argument(code: types.CodeType, argument: int) -> int:
    return argument


def _below(extra: int) -> Callable[[int], tuple[int, ...]]:
    # The lowest operand first, as arguments were pushed.
    return lambda argument: tuple(range(argument + extra, 0, -1))


def _is_odd(argument: int) -> bool:
    return bool(argument & 1)


def _unpacked(argument: int) -> tuple[int, ...]:
    # Below the arguments lie the callable and NULL, in one order or the other.
    return (4, 3, 2, 1) if argument & 1 else (3, 2, 1)


def _formatted(argument: int) -> tuple[int, ...]:
    return (2, 1) if argument & 4 else (1,)


_PLAIN = Take.UNLESS_PLAIN
RULES = {
    "LOAD_ATTR": Rule(Kind.ATTRIBUTE, (1,), constant=_name(1 if _NEW else 0), result=True, pair=_is_odd if _NEW else Rule.pair),
    "LOAD_METHOD": Rule(Kind.ATTRIBUTE, (1,), constant=_name(0), result=True, pair=lambda argument: True),
    "LOAD_SUPER_ATTR": Rule(Kind.SUPER, (1, 2, 3), constant=_name(2), result=True, pair=_is_odd),
    "STORE_ATTR": Rule(Kind.SET_ATTRIBUTE, (1, 2), constant=_name(0)),
    "DELETE_ATTR": Rule(Kind.DELETE_ATTRIBUTE, (1,), constant=_name(0)),
    "BINARY_SUBSCR": Rule(Kind.ITEM, (2, 1), _PLAIN, result=True),
    "STORE_SUBSCR": Rule(Kind.SET_ITEM, (2, 1, 3)),
    "DELETE_SUBSCR": Rule(Kind.DELETE_ITEM, (2, 1)),
    "BINARY_SLICE": Rule(Kind.SLICE, (3, 2, 1), _PLAIN, result=True),
    "STORE_SLICE": Rule(Kind.SET_SLICE, (3, 2, 1, 4)),
    "LOAD_GLOBAL": Rule(Kind.GLOBAL, take=Take.FIND_GLOBAL, constant=_name(1), result=True, pair=_is_odd),
    "STORE_GLOBAL": Rule(Kind.SET_GLOBAL, (1,), Take.GLOBALS, _name(0)),
    "DELETE_GLOBAL": Rule(Kind.DELETE_GLOBAL, (), Take.GLOBALS, _name(0)),
    "LOAD_NAME": Rule(Kind.NAME, take=Take.FIND_NAME, constant=_name(0), result=True),
    "LOAD_FROM_DICT_OR_GLOBALS": Rule(Kind.NAME, (1,), Take.FIND_NAME, _name(0), True),
    "STORE_NAME": Rule(Kind.SET_NAME, (1,), Take.NAMESPACE, _name(0)),
    "DELETE_NAME": Rule(Kind.DELETE_NAME, (), Take.NAMESPACE, _name(0)),
    "SETUP_ANNOTATIONS": Rule(Kind.SET_NAME, (), Take.NAMESPACE, _own("__annotations__")),
    "LOAD_DEREF": Rule(Kind.DEREF, constant=_variable, result=True),
    "LOAD_CLASSDEREF": Rule(Kind.DEREF, take=Take.CELL_AND_NAMESPACE, constant=_variable, result=True),
    "LOAD_FROM_DICT_OR_DEREF": Rule(Kind.DEREF, (1,), constant=_variable, result=True),
    "STORE_DEREF": Rule(Kind.SET_DEREF, (1,), constant=_variable),
    "DELETE_DEREF": Rule(Kind.DELETE_DEREF, constant=_variable),
    "MAKE_CELL": Rule(Kind.CELL, result=True),
    "GET_ITER": Rule(Kind.ITERATE, (1,), result=True),
    "GET_YIELD_FROM_ITER": Rule(Kind.ITERATE, (1,), result=True),
    "GET_AITER": Rule(Kind.ITERATE, (1,), result=True),
    "FOR_ITER": Rule(Kind.NEXT, (1,), result=True),
    "GET_ANEXT": Rule(Kind.NEXT, (1,), result=True),
    "SEND": Rule(Kind.SEND, (2, 1), result=True, jumps=True),
    "GET_AWAITABLE": Rule(Kind.AWAIT, (1,), result=True),
    "GET_LEN": Rule(Kind.LENGTH, (1,), _PLAIN, result=True),
    "UNPACK_SEQUENCE": Rule(Kind.UNPACK, (1,), constant=_argument),
    "UNPACK_EX": Rule(Kind.UNPACK, (1,), constant=_argument),
    "CONTAINS_OP": Rule(Kind.CONTAINS, (1, 2), _PLAIN),
    "IS_OP": Rule(Kind.IDENTITY, (2, 1), Take.UNLESS_ONE_ALONE),
    "COMPARE_OP": Rule(Kind.COMPARE, (2, 1), _PLAIN, _comparison, True),
    "BINARY_OP": Rule(Kind.BINARY, (2, 1), _PLAIN, _operator, True),
    "UNARY_POSITIVE": Rule(Kind.UNARY, (1,), _PLAIN, _own("+"), True),
    "UNARY_NEGATIVE": Rule(Kind.UNARY, (1,), _PLAIN, _own("-"), True),
    "UNARY_INVERT": Rule(Kind.UNARY, (1,), _PLAIN, _own("~"), True),
    "CALL": Rule(Kind.CALL, _below(2), Take.CALL, result=True),
    "CALL_KW": Rule(Kind.CALL, _below(3), Take.CALL_NAMES, result=True),
    "CALL_FUNCTION_EX": Rule(Kind.CALL_UNPACKED, _unpacked, Take.CALL_UNPACKED, result=True),
    "SET_ADD": Rule(Kind.HASH, (1,), _PLAIN),
    "MAP_ADD": Rule(Kind.HASH, (2,), _PLAIN),
    "BUILD_SET": Rule(Kind.HASH, _below(0), _PLAIN),
    "BUILD_MAP": Rule(Kind.HASH, lambda argument: tuple(range(2 * argument, 0, -2)), _PLAIN),
    "FORMAT_VALUE": Rule(Kind.FORMAT, _formatted, _PLAIN, lambda code, argument: argument & 3, True),
    "CONVERT_VALUE": Rule(Kind.FORMAT, (1,), _PLAIN, _argument, True),
    "FORMAT_SIMPLE": Rule(Kind.FORMAT, (1,), _PLAIN, lambda code, argument: 0, True),
    "FORMAT_WITH_SPEC": Rule(Kind.FORMAT, (2, 1), _PLAIN, lambda code, argument: 0, True),
    "BEFORE_WITH": Rule(Kind.WITH, (1,), result=True),
    "BEFORE_ASYNC_WITH": Rule(Kind.WITH, (1,), result=True),
    "WITH_EXCEPT_START": Rule(Kind.LEAVE, (4, 1), result=True),
    "IMPORT_NAME": Rule(Kind.IMPORT, (2, 1), constant=_name(0), result=True),
    "IMPORT_FROM": Rule(Kind.IMPORT_FROM, (1,), constant=_name(0), result=True),
    "IMPORT_STAR": Rule(Kind.IMPORT_FROM, (1,), constant=_own("*")),
    "RAISE_VARARGS": Rule(Kind.RAISE, _below(0)),
    "CHECK_EXC_MATCH": Rule(Kind.EXCEPT, (2, 1)),
    "CHECK_EG_MATCH": Rule(Kind.EXCEPT, (2, 1)),
    "MAKE_FUNCTION": Rule(Kind.FUNCTION, (1,), result=True),
    "LOAD_BUILD_CLASS": Rule(Kind.BUILD_CLASS, result=True),
    "CALL_INTRINSIC_1": Rule(Kind.INTRINSIC, (1,), constant=_intrinsic(1), result=True),
    "CALL_INTRINSIC_2": Rule(Kind.INTRINSIC, (2, 1), constant=_intrinsic(2), result=True),
    "PRINT_EXPR": Rule(Kind.DISPLAY, (1,)),
}
RULES |= {
    name: Rule(Kind.EXTEND, (1,), constant=_own(name)) for name in ("LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE")
}
RULES |= {name: Rule(Kind.TEST, (1,), _PLAIN) for name in (
    "UNARY_NOT", "TO_BOOL", "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP",
    "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_TRUE",
)}  # fmt: skip
RULES |= {
    name: Rule(Kind.MATCH, operands, _PLAIN, _own(name), True)
    for name, operands in (("MATCH_MAPPING", (1,)), ("MATCH_SEQUENCE", (1,)), ("MATCH_KEYS", (2, 1)), ("MATCH_CLASS", (3, 2, 1)))
}

# They touch the frame's own variables and stack, and nothing else.
_HARMLESS = frozenset({
    "POP_TOP", "PUSH_NULL", "NOP", "PUSH_EXC_INFO", "POP_EXCEPT", "PREP_RERAISE_STAR", "RERAISE",
    "LOAD_ASSERTION_ERROR", "RETURN_GENERATOR", "RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "ASYNC_GEN_WRAP",
    "LIST_TO_TUPLE", "LIST_APPEND", "END_ASYNC_FOR", "END_FOR", "END_SEND", "CLEANUP_THROW", "SWAP", "COPY",
    "LOAD_CONST", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_LOAD_FAST", "STORE_FAST",
    "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "DELETE_FAST", "LOAD_CLOSURE", "LOAD_LOCALS", "COPY_FREE_VARS",
    "RESUME", "PRECALL", "KW_NAMES", "BUILD_TUPLE", "BUILD_LIST", "BUILD_SLICE", "BUILD_STRING",
    "BUILD_CONST_KEY_MAP", "SET_FUNCTION_ATTRIBUTE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT",
    "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE",
    "POP_JUMP_BACKWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE", "EXTENDED_ARG",
})  # fmt: skip
# Inside of the interpreter, the compiler or an instrumented copy; ``co_code`` has none of them.
_ABSENT = frozenset({"CACHE", "RESERVED", "INTERPRETER_EXIT", "EXIT_INIT_CHECK", "ENTER_EXECUTOR"})
CELL_OPCODES = frozenset({"LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "MAKE_CELL"})


def treatment(name: str) -> str:
    """Return ``seen``, ``harmless``, ``absent`` or ``unknown`` for the name of an opcode."""
    if name in RULES:
        return "seen"
    if name in _ABSENT or dis.opmap.get(name, 0) > 255 or name.startswith("INSTRUMENTED_"):
        return "absent"
    return "harmless" if name in _HARMLESS else "unknown"


# One for each instruction that is seen: number of its first code unit, kind, take, slots, constant, the unit that follows
# and the slot of its result there, the same for its jump. Slots count from the frame's first local variable.
Step = tuple[int, Kind, int, tuple[int, ...], Any, int, int, int, int]


class OperandPlan(NamedTuple):
    """The plan of a code object. Lists have an entry for each code unit (two bytes)."""

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
        """The unit that the instruction may jump to, or None."""
        if self.opcode not in _JUMPS:
            return None
        return self.after - self.argument if "JUMP_BACKWARD" in self.name else self.after + self.argument

    def effect(self, jump: bool) -> int:
        """Return by how many values the stack grows."""
        if not _NEW and self.name in ("PRECALL", "CALL"):  # the compiler's account has the arguments go one step early
            return 0 if self.name == "PRECALL" else -self.argument - 1
        return dis.stack_effect(self.opcode, self.argument if self.opcode in _WITH_ARGUMENT else None, jump=jump)


_JUMPS = frozenset(dis.hasjrel)
_LEAVING = frozenset(
    {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
)

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
    # A generator begins with a value on its stack, which some versions do not count as RETURN_GENERATOR's.
    starts_deep = code.co_flags & _GENERATORS and dis.stack_effect(dis.opmap["RETURN_GENERATOR"]) == 0
    reached = {0: 1 if starts_deep else 0}
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        # A handler begins with the exception on the stack, and with the place of the raise if lasti is set.
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


def plan_of(code: types.CodeType, variables: int) -> OperandPlan:
    """Return the plan of a code object whose frames have ``variables`` slots, cells included, below their stack."""
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
    return OperandPlan(tuple(steps), starts, listed, handlers, tuple(at.argument for at in made))


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


Event = _C.ObservedEvent  # something that a user's frame did
MISSING = _C.MISSING
CannotObserve = _C.CannotObserve  # a NotImplementedError: by this Python, or by what else watches it

IsUsers = Callable[[types.CodeType, dict[str, Any]], bool]
Check = Callable[[Event], None]


class observing(_C.Observation):
    """Observe the calling thread's user code in the block: ``with observing(is_users) as seen``.

    ``is_users(code, globals)`` is asked once for each code object, and returns whether it is the user's. Frames that
    run already when the observation begins are not seen, nor are other threads. Raises CannotObserve where this Python
    cannot be observed, or where another tool (a tracer) has its place, and RuntimeError where the thread is observed
    already.

    ``check`` is called with each event of the kinds ``checked`` before it happens, without its result. An exception
    that it raises is raised in the user's frame, and the operation does not happen.

    After the block ``events`` has the events in order. Events keep their objects alive: release them with ``drop``.
    """

    def __new__(  # noqa: D102
        cls, is_users: IsUsers, check: Check | None = None, checked: Collection[Kind] = ()
    ) -> observing:
        return super().__new__(cls, Kind.ENTER, Kind.CELLS, check, tuple(checked))

    def __init__(self, is_users: IsUsers, check: Check | None = None, checked: Collection[Kind] = ()) -> None:
        self.events: list[Event] = []
        self._is_users = is_users

    @property
    def complete(self) -> bool:
        """True if everything was seen; ``why_not`` has the reason otherwise."""
        return not self.why_not

    def drop(self) -> list[str]:
        """Release the events; return the lines of user code (finalizers, closed generators) that ran because of that."""
        with observing(self._is_users) as last:
            self.events = []
        lines = [last.line(event) for event in last.events if not _says_nothing(event)]
        return [*dict.fromkeys(lines if last.complete else [*lines, last.why_not])]

    def line(self, event: Event) -> str:
        """Return ``file:line, in function: code`` of an event."""
        return line_of(event)

    def _end(self) -> None:
        # The native class calls this as the block ends, and _plan for each code object that it meets.
        self.events = self.take_events()

    def _plan(self, code: types.CodeType, space: dict[str, Any], variables: int) -> OperandPlan | None:
        if space is globals() or not self._is_users(code, space):
            return None
        known = _plans.get(id(code))
        if known is not None and known[0]() is code:
            return known[1]
        plan = plan_of(code, variables)
        _plans[id(code)] = weakref.ref(code, functools.partial(_forget, id(code))), plan
        return plan


# By identity: code objects that are equal may hold constants whose comparison is somebody's code.
_plans: dict[int, tuple[weakref.ref[types.CodeType], OperandPlan]] = {}


def _forget(key: int, _: object) -> None:
    _plans.pop(key, None)


def _says_nothing(event: Event) -> bool:
    # A generator that is closed goes on for a moment, without doing anything.
    closed = event.kind is Kind.INTRINSIC and event.operands[1] == "INTRINSIC_STOPITERATION_ERROR"
    return closed or event.kind in (Kind.ENTER, Kind.CELLS)


def line_of(event: Event) -> str:
    """Return ``file:line, in function: code`` of the place where an event was seen."""
    code = event.code
    number = code.co_firstlineno
    for start, end, line in code.co_lines():
        if start <= event.offset < end and line is not None:
            number = line
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number}, in {code.co_name}: {text}"
