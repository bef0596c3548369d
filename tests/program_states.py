"""Where users keep numbers that their training steps read: one small table of Python's places.

Each ``State`` is source code. ``$n`` stands for a number that makes names unique, ``$a`` for the first value, ``$v`` for a
new one, ``$m`` for what the model is called where the state is read. A value is a float between 0.25 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """One place, and how it is made, read, changed and looked at in the end."""

    define: str = ""  # statements before the model is made
    read: str = ""  # an expression, a number; empty: what the step computes depends on it in another way
    write: str = ""  # statements that change it; empty: reading it does
    keep: str = ""  # an expression that is compared at the end, if not ``read``
    late: str = ""  # statements behind model and optimizer
    last: str = ""  # statements behind the step function
    restore: str = ""  # statements at the very end
    rebinds: str = ""  # names that ``write``, ``read`` or a helper bind anew
    scope: str = ""  # "closure" or "global", where only one of them is meant
    inside: bool = True  # whether the step itself may change it
    between: bool = True  # whether the loop may change it
    batch: str = ""  # how a batch is made of x, y, i (its number) and value
    unpack: str = ""  # how the step finds x and y in it
    around: str = ""  # a context in which the step is called
    optimizer: str = ""  # how the optimizer is made, if it must be a certain one
    raises: bool = False  # whether the program means to raise
    modes: tuple[str, ...] = ()  # "between", "inside", "trials", "never": all that it can, if empty


_ON = '("a" if $v > 0.6 else "b")'
_ON_FIRST = '("a" if $a > 0.6 else "b")'

PYTHON: dict[str, list[State]] = {
    "closure cells": [State("x$n = $a", "x$n", "x$n = $v", rebinds="x$n", scope="closure")],
    "globals": [State("x$n = $a", "x$n", "x$n = $v", rebinds="x$n", scope="global")],
    "attributes of the model": [State(late="model.w$n = $a", read="$m.w$n", write="model.w$n = $v")],
    "attributes of a submodule": [
        State(late="model.body.w$n = $a", read="$m.body.w$n", write="model.body.w$n = $v"),
        State(late="model.body.linear.w$n = $a", read="$m.body.linear.w$n", write="model.body.linear.w$n = $v"),
    ],
    "nested lists and dicts": [
        State('x$n = {"a": [{"w": $a}]}', 'x$n["a"][0]["w"]', 'x$n["a"][0]["w"] = $v'),
        State('x$n = {"a": [{"w": $a}]}', 'x$n["a"][0]["w"]', 'x$n["a"] = [{"w": $v}]'),
        State("x$n = (1, [$a])", "x$n[1][0]", "x$n[1][0] = $v"),
        State("x$n = [$a, 1.0]", "x$n[0]", "x$n.insert(0, $v)"),
        State('x$n = {"w": $a}', 'x$n.get("w", 1.0)', 'x$n.update(w=$v)'),
    ],
    "sets": [
        State("x$n = {$a}", "max(x$n)", "x$n.clear(); x$n.add($v)"),
        State(f"x$n = {{{_ON_FIRST}}}", '(1.0 if "a" in x$n else 0.5)', f"x$n.clear(); x$n.add({_ON})"),
        State("x$n = frozenset([$a])", "max(x$n)", "x$n = frozenset([$v])", rebinds="x$n"),
    ],
    "deques": [
        State("x$n = collections.deque([1.0, $a], maxlen=2)", "x$n[-1]", "x$n.append($v)"),
        State("x$n = collections.deque([$a] * 3, maxlen=3)", "(sum(x$n) / len(x$n))", "x$n.append($v)"),
        State("x$n = collections.deque([0.5, 1.0, $a])", "x$n[0]", "x$n.rotate(1)", keep="x$n"),
    ],
    "order of dicts": [
        State("x$n = collections.OrderedDict(a=$a, b=0.75, c=1.25)", "next(iter(x$n.values()))",
              "x$n.move_to_end(next(iter(x$n)))", keep="x$n"),
        State('x$n = {"a": $a, "b": 0.75, "c": 1.25}', "next(iter(x$n.values()))",
              "key$n = next(iter(x$n)); x$n[key$n] = x$n.pop(key$n)", keep="x$n"),
    ],
    "other mappings": [
        State("x$n = collections.UserDict(w=$a)", 'x$n["w"]', 'x$n["w"] = $v'),
        State('x$n = {"w": $a}\ny$n = collections.ChainMap({}, x$n)', 'y$n["w"]', 'x$n["w"] = $v'),
        State('x$n = {"w": $a}\ny$n = types.MappingProxyType(x$n)', 'y$n["w"]', 'x$n["w"] = $v'),
        State("x$n = collections.defaultdict(lambda: $a)", 'x$n["w"]', 'x$n["w"] = $v', keep="dict(x$n)"),
        State("x$n = collections.Counter(w=int(8 * $a))", '(x$n["w"] / 8)', 'x$n["w"] = int(8 * $v)'),
        State("x$n = collections.UserList([$a])", "x$n[0]", "x$n[0] = $v"),
    ],
    "subclasses of builtins": [
        State("class D$n(dict): pass\nx$n = D$n(); x$n.w = $a", "x$n.w", "x$n.w = $v"),
        State("class L$n(list): pass\nx$n = L$n([1, 2]); x$n.w = $a", "x$n.w", "x$n.w = $v"),
        State("class I$n(int): pass\nx$n = I$n(3); x$n.w = $a", "x$n.w", "x$n.w = $v"),
        State("class S$n(str): pass\nx$n = S$n('x'); x$n.w = $a", "x$n.w", "x$n.w = $v"),
        State("class F$n(float): pass\nx$n = F$n(1.0); x$n.w = $a", "(x$n * x$n.w)", "x$n.w = $v"),
        State("class T$n(tuple): pass\nx$n = T$n((1, 2)); x$n.w = $a", "x$n.w", "x$n.w = $v"),
    ],
    "dataclasses": [
        State("@dataclasses.dataclass\nclass C$n:\n    w: float = 1.0\nx$n = C$n($a)", "x$n.w", "x$n.w = $v"),
        State("@dataclasses.dataclass(frozen=True)\nclass C$n:\n    w: float = 1.0\nx$n = C$n($a)", "x$n.w",
              'object.__setattr__(x$n, "w", $v)'),
        State("@dataclasses.dataclass(slots=True)\nclass C$n:\n    w: float = 1.0\nx$n = C$n($a)", "x$n.w", "x$n.w = $v"),
        State("@dataclasses.dataclass(frozen=True)\nclass C$n:\n    w: float = 1.0\nx$n = C$n($a)", "x$n.w",
              "x$n = dataclasses.replace(x$n, w=$v)", rebinds="x$n"),
    ],
    "slots": [
        State('class C$n:\n    __slots__ = ("w",)\nx$n = C$n(); x$n.w = $a', "x$n.w", "x$n.w = $v"),
        State('class B$n:\n    __slots__ = ("w",)\nclass C$n(B$n):\n    __slots__ = ("u",)\nx$n = C$n(); x$n.w = $a',
              "x$n.w", "x$n.w = $v"),
    ],
    "namespaces": [
        State("x$n = types.SimpleNamespace(w=$a)", "x$n.w", "x$n.w = $v"),
        State("x$n = argparse.Namespace(w=$a)", "x$n.w", 'setattr(x$n, "w", $v)'),
        State("class C$n: pass\nx$n = C$n(); x$n.w = $a", 'getattr(x$n, "w")', 'x$n.__dict__["w"] = $v'),
        State("class C$n: pass\nx$n = C$n(); x$n.w = $a", 'vars(x$n)["w"]', "x$n.w = $v"),
        State("x$n = threading.local(); x$n.w = $a", "x$n.w", "x$n.w = $v"),
    ],
    "named tuples": [
        State('N$n = collections.namedtuple("N$n", "w k")\nx$n = N$n($a, 1)', "x$n.w", "x$n = x$n._replace(w=$v)",
              rebinds="x$n"),
        State('N$n = collections.namedtuple("N$n", "w k")\nx$n = N$n([$a], 1)', "x$n.w[0]", "x$n.w[0] = $v"),
    ],
    "enums": [
        State("class E$n(enum.Enum):\n    A = 1\nE$n.A.w = $a", "E$n.A.w", "E$n.A.w = $v"),
        State("class E$n(enum.Enum):\n    A = 1.0\n    B = 0.5\nx$n = E$n.A if $a > 0.6 else E$n.B", "x$n.value",
              "x$n = E$n.A if $v > 0.6 else E$n.B", rebinds="x$n"),
    ],
    "functions' attributes": [
        State("def f$n(): return f$n.w\nf$n.w = $a", "f$n()", "f$n.w = $v"),
        State(last="step.w$n = $a", read="step.w$n", write="step.w$n = $v"),
    ],
    "functions' defaults": [
        State("def f$n(w=$a): return w", "f$n()", "f$n.__defaults__ = ($v,)"),
        State("def f$n(*, w=$a): return w", "f$n()", 'f$n.__kwdefaults__["w"] = $v'),
        State("def f$n(*, w=$a): return w", "f$n()", 'f$n.__kwdefaults__ = {"w": $v}'),
        State("def f$n(w=[$a]): return w[0]", "f$n()", "f$n.__defaults__[0][0] = $v"),
    ],
    "functions' code": [
        State("def f$n(): return $a\ndef g$n(): return 0.75\ndef h$n(): return 1.5", "f$n()",
              "f$n.__code__ = g$n.__code__ if $v > 0.6 else h$n.__code__"),
        State("def f$n(w):\n    return lambda: w\ng$n = f$n($a)", "g$n()", "g$n.__closure__[0].cell_contents = $v"),
    ],
    "partials": [
        State("x$n = functools.partial(lambda w: w, w=$a)", "x$n()", 'x$n.keywords["w"] = $v'),
        State("x$n = functools.partial(lambda w: w[0], [$a])", "x$n()", "x$n.args[0][0] = $v"),
        State("x$n = functools.partial(lambda: 1.0); x$n.w = $a", "(x$n() * x$n.w)", "x$n.w = $v"),
        State("x$n = functools.partial(lambda w: w, $a)", "x$n()", "x$n = functools.partial(lambda w: w, $v)",
              rebinds="x$n"),
    ],
    "bound methods": [
        State("class C$n:\n    def get(self): return self.w\ny$n = C$n(); y$n.w = $a\nx$n = y$n.get", "x$n()", "y$n.w = $v"),
        State("x$n = [$a]\ny$n = x$n.__getitem__", "y$n(0)", "x$n[0] = $v"),
        State('x$n = {"w": $a}\ny$n = x$n.get', 'y$n("w")', 'x$n["w"] = $v'),
    ],
    "class attributes": [
        State("class C$n:\n    w = $a", "C$n.w", "C$n.w = $v"),
        State("class C$n:\n    w = $a\nx$n = C$n()", "x$n.w", "C$n.w = $v"),
        State("class B$n:\n    w = $a\nclass C$n(B$n): pass\nx$n = C$n()", "x$n.w", "B$n.w = $v"),
        State(late="Net.w$n = $a", read="$m.w$n", write="Net.w$n = $v"),
        State(late="Body.w$n = $a", read="$m.body.w$n", write="type(model.body).w$n = $v"),
        State("class B$n:\n    @classmethod\n    def get(cls): return cls.w\nclass C$n(B$n):\n    w = $a", "C$n.get()", "C$n.w = $v"),
    ],
    "metaclasses": [
        State("class M$n(type):\n    w = $a\nclass C$n(metaclass=M$n): pass", "C$n.w", "M$n.w = $v"),
        State("class M$n(type):\n    @property\n    def w(cls): return cls.hidden\nclass C$n(metaclass=M$n):\n    hidden = $a",
              "C$n.w", "C$n.hidden = $v"),
        State("class M$n(type):\n    def __getattr__(cls, name): return held$n[0]\nheld$n = [$a]\nclass C$n(metaclass=M$n): pass",
              "C$n.anything", "held$n[0] = $v"),
    ],
    "properties": [
        State("class C$n:\n    @property\n    def w(self): return self.hidden\nx$n = C$n(); x$n.hidden = $a", "x$n.w",
              "x$n.hidden = $v"),
        State("held$n = [$a]\nclass C$n:\n    @property\n    def w(self): return held$n[0]\nx$n = C$n()", "x$n.w", "held$n[0] = $v"),
        State("held$n = [$a]\nclass C$n:\n    @functools.cached_property\n    def w(self): return held$n[0]\nx$n = C$n()", "x$n.w",
              'held$n[0] = $v; x$n.__dict__.pop("w", None)'),
        State("x$n = [$a]", late="Net.w$n = property(lambda self: x$n[0])", read="$m.w$n", write="x$n[0] = $v"),
    ],
    "__getattr__": [
        State("class C$n:\n    def __getattr__(self, name): return held$n[name]\nheld$n = dict(w=$a)\nx$n = C$n()", "x$n.w",
              'held$n["w"] = $v'),
        State("class C$n:\n    def __getattribute__(self, name):\n"
              "        return held$n[name] if name in held$n else object.__getattribute__(self, name)\n"
              "held$n = dict(w=$a)\nx$n = C$n()", "x$n.w",
              'held$n["w"] = $v', keep="held$n"),
        State("class C$n(dict):\n    __getattr__ = dict.__getitem__\nx$n = C$n(w=$a)", "x$n.w", 'x$n["w"] = $v'),
    ],
    "descriptors": [
        State("class G$n:\n    def __get__(self, owner, cls): return self.w\ng$n = G$n(); g$n.w = $a\nclass C$n:\n    w = g$n\nx$n = C$n()",
              "x$n.w", "g$n.w = $v"),
    ],
    "special methods": [
        State("class C$n:\n    def __call__(self): return self.w\nx$n = C$n(); x$n.w = $a", "x$n()", "x$n.w = $v"),
        State("class C$n:\n    def __len__(self): return self.w\nx$n = C$n(); x$n.w = int(8 * $a)", "(len(x$n) / 8)",
              "x$n.w = int(8 * $v)"),
        State("class C$n:\n    def __iter__(self): return iter([self.w])\nx$n = C$n(); x$n.w = $a", "sum(x$n)", "x$n.w = $v"),
        State("class C$n:\n    def __contains__(self, key): return self.w > 0.6\nx$n = C$n(); x$n.w = $a", "(1.0 if 1 in x$n else 0.5)",
              "x$n.w = $v"),
        State("class C$n:\n    def __eq__(self, other): return self.w > 0.6\n    __hash__ = None\nx$n = C$n(); x$n.w = $a",
              "(1.0 if x$n == 1 else 0.5)", "x$n.w = $v", keep="x$n.w"),
        State("class C$n:\n    def __hash__(self): return int(8 * self.w)\nx$n = C$n(); x$n.w = $a", "(hash(x$n) / 8)", "x$n.w = $v"),
        State("class C$n:\n    def __getitem__(self, key): return self.w\nx$n = C$n(); x$n.w = $a", "x$n[0]", "x$n.w = $v"),
        State("class C$n:\n    def __bool__(self): return self.w > 0.6\nx$n = C$n(); x$n.w = $a", "(1.0 if x$n else 0.5)", "x$n.w = $v"),
        State("class C$n:\n    def __float__(self): return self.w\nx$n = C$n(); x$n.w = $a", "float(x$n)", "x$n.w = $v"),
        State("class C$n:\n    def __lt__(self, other): return self.w > 0.6\nx$n = C$n(); x$n.w = $a",
              "(1.0 if x$n < 1 else 0.5)", "x$n.w = $v"),
        State("class C$n:\n    def __rmul__(self, other): return other * self.w\nx$n = C$n(); x$n.w = $a", "(1.0 * x$n)", "x$n.w = $v"),
        State("class C$n:\n    def __index__(self): return self.w\nx$n = C$n(); x$n.w = int($a > 0.6)", "[0.5, 1.0][x$n]",
              "x$n.w = int($v > 0.6)"),
        State("class C$n:\n    def __str__(self): return str(self.w)\nx$n = C$n(); x$n.w = $a", 'float(f"{x$n}")', "x$n.w = $v"),
        State("class C$n(dict):\n    def __missing__(self, key): return held$n[0]\nheld$n = [$a]\nx$n = C$n()", 'x$n["w"]',
              "held$n[0] = $v"),
        State("class C$n:\n    def __enter__(self): return self.w\n    def __exit__(self, *_): pass\n"
              "def f$n():\n    with x$n as w: return w\nx$n = C$n(); x$n.w = $a", "f$n()", "x$n.w = $v"),
    ],
    "static variables": [
        State("def f$n(w=None, _kept=[$a]):\n    _kept[0] = _kept[0] if w is None else w\n    return _kept[0]", "f$n()", "f$n($v)"),
        State("class C$n:\n    calls = 0\n    @classmethod\n    def get(cls):\n        cls.calls += 1\n        return $a / cls.calls",
              "C$n.get()", "", keep="C$n.calls"),
        State("def f$n():\n    f$n.calls += 1\n    return $a / f$n.calls\nf$n.calls = 0", "f$n()", "", keep="f$n.calls"),
    ],
    "iterators": [
        State("x$n = itertools.count(1)", "($a / next(x$n))", ""),
        State("x$n = itertools.cycle([$a, 0.5, 1.5])", "next(x$n)", ""),
        State("x$n = iter([$a, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0] * 9)", "next(x$n)", ""),
        State("def g$n():\n    w = $a\n    while True:\n        yield w\n        w = 0.25 + 0.5 * w\nx$n = g$n()", "next(x$n)", ""),
        State("def g$n():\n    w = $a\n    while True:\n        w = (yield w) or w\nx$n = g$n(); next(x$n)", "next(x$n)", "x$n.send($v)"),
        State("x$n = zip(itertools.count(1), itertools.repeat($a))", "(lambda k, w: w / k)(*next(x$n))", ""),
    ],
    "caches": [
        State("held$n = [$a]\n@functools.lru_cache\ndef f$n(key): return held$n[0]", "f$n(0)", "held$n[0] = $v; f$n.cache_clear()",
              keep="(f$n(0), f$n.cache_info().currsize)"),
        State("held$n = [$a]\n@functools.cache\ndef f$n(key): return held$n[0]", "f$n(0)", "held$n[0] = $v", keep="f$n(0)"),
        State("@functools.cache\ndef f$n(key): return 0.5 * key", "f$n(1.5)", keep="f$n.cache_info().currsize"),
        State("@functools.lru_cache\ndef f$n(key): return torch.full((3,), key)\nheld$n = [$a]", "f$n(held$n[0]).mean()",
              "held$n[0] = $v", keep="f$n(held$n[0])"),
        State("x$n = {}\nheld$n = [$a]", "x$n.setdefault(held$n[0], torch.full((3,), held$n[0])).mean()", "held$n[0] = $v", keep="x$n"),
    ],
    "context variables": [
        State('x$n = contextvars.ContextVar("x$n"); x$n.set($a)', "x$n.get()", "x$n.set($v)"),
        State('x$n = contextvars.ContextVar("x$n", default=$a)', "x$n.get()", "x$n.set($v)"),
    ],
    "environment": [
        State('os.environ["WF_$n"] = str($a)', 'float(os.environ["WF_$n"])', 'os.environ["WF_$n"] = str($v)',
              restore='del os.environ["WF_$n"]'),
        State('os.environ["WF_$n"] = str($a)', 'float(os.getenv("WF_$n", 1.0))', 'os.environ["WF_$n"] = str($v)',
              restore='os.environ.pop("WF_$n", None)'),
        State("", '(1.0 if "WF_$n" in os.environ else 0.5)', 'os.environ["WF_$n"] = "1"', restore='os.environ.pop("WF_$n", None)',
              modes=("between", "inside")),
    ],
    "modules imported in the step": [
        State('sys.modules["wf_$n"] = types.ModuleType("wf_$n"); sys.modules["wf_$n"].w = $a\n'
              "def f$n():\n    import wf_$n\n    return wf_$n.w", "f$n()", 'sys.modules["wf_$n"].w = $v',
              restore='del sys.modules["wf_$n"]'),
        State('sys.modules["wf_$n"] = types.ModuleType("wf_$n"); sys.modules["wf_$n"].w = $a\n'
              "def f$n():\n    from wf_$n import w\n    return w", "f$n()", 'sys.modules["wf_$n"].w = $v',
              restore='del sys.modules["wf_$n"]'),
    ],
    "entries of sys.modules": [
        State('sys.modules["wf_$n"] = types.SimpleNamespace(w=$a)\ndef f$n():\n    import wf_$n\n    return wf_$n.w', "f$n()",
              'sys.modules["wf_$n"] = types.SimpleNamespace(w=$v)', restore='del sys.modules["wf_$n"]'),
        State('sys.modules["wf_$n"] = types.SimpleNamespace(w=$a)', 'sys.modules["wf_$n"].w',
              'sys.modules["wf_$n"] = types.SimpleNamespace(w=$v)', restore='del sys.modules["wf_$n"]'),
        State('sys.modules["wf_$n"] = types.SimpleNamespace(w=$a)', 'importlib.import_module("wf_$n").w', 'sys.modules["wf_$n"].w = $v',
              restore='del sys.modules["wf_$n"]'),
    ],
    "patched libraries": [
        State("F.wf_$n = $a", "F.wf_$n", "F.wf_$n = $v", restore="del F.wf_$n"),
        State("math.wf_$n = $a", "math.wf_$n", "math.wf_$n = $v", restore="del math.wf_$n"),
        State("plain$n = F.softplus\ndef f$n(w): return lambda x: plain$n(x) * w\nF.softplus = f$n($a)",
              "F.softplus(torch.ones(2)).mean()",
              "F.softplus = f$n($v)", restore="F.softplus = plain$n"),
        State("plain$n = nn.Linear.forward\ndef f$n(w): return lambda self, x: plain$n(self, x) * w\nnn.Linear.forward = f$n($a)", "",
              "nn.Linear.forward = f$n($v)", restore="nn.Linear.forward = plain$n"),
        State("plain$n = math.sqrt\ndef f$n(w): return lambda x: w\nmath.sqrt = f$n($a)", "math.sqrt(1.0)", "math.sqrt = f$n($v)",
              restore="math.sqrt = plain$n"),
    ],
    "registries": [
        State('x$n = {}\ndef register$n(key):\n    return lambda made: x$n.setdefault(key, made)\n@register$n("a")\ndef f$n(): return $a',
              'x$n["a"]()', 'w$n = $v; x$n["a"] = functools.partial(float, w$n)'),
        State('x$n = {"a": lambda: 1.0, "b": lambda: 0.5}\ny$n = ' + _ON_FIRST, "x$n[y$n]()", f"y$n = {_ON}", rebinds="y$n"),
        State("class B$n:\n    kinds = []\n    def __init_subclass__(cls): B$n.kinds.append(cls)\nclass C$n(B$n):\n    w = $a",
              "B$n.kinds[-1].w", 'type("D$n", (B$n,), {"w": $v})'),
    ],
    "weak references": [
        State("class C$n: pass\ny$n = C$n(); y$n.w = $a\nx$n = weakref.ref(y$n)", "x$n().w", "y$n.w = $v", keep="y$n.w"),
        State("class C$n: pass\ny$n = C$n(); y$n.w = $a\nx$n = weakref.WeakKeyDictionary({y$n: y$n.w})", "x$n[y$n]", "x$n[y$n] = $v",
              keep="x$n[y$n]"),
        State('class C$n: pass\ny$n = C$n(); y$n.w = $a\nx$n = weakref.WeakValueDictionary({"a": y$n})', 'x$n["a"].w', "y$n.w = $v",
              keep="y$n.w"),
        State("class C$n: pass\ny$n = C$n(); y$n.w = $a\nx$n = weakref.proxy(y$n)", "x$n.w", "y$n.w = $v", keep="y$n.w"),
        State("class C$n: pass\ny$n = C$n()\nx$n = weakref.ref(y$n)", "(1.0 if x$n() is not None else 0.5)", "y$n = None",
              keep="y$n is None", rebinds="y$n",
              modes=("between",)),
    ],
    "numpy": [
        State("x$n = np.array([$a])", "float(x$n[0])", "x$n[0] = $v"),
        State("x$n = np.array($a)", "float(x$n)", "x$n[...] = $v"),
        State("x$n = np.float64($a)", "x$n", "x$n = np.float64($v)", rebinds="x$n"),
        State("x$n = np.array([$a], np.float32)", "torch.from_numpy(x$n).mean()", "x$n[0] = $v"),
        State("x$n = np.array([$a], np.float32)", "torch.tensor(x$n).mean()", "x$n[0] = $v"),
        State("x$n = np.array([(1, $a)], dtype=[('k', int), ('w', float)])", 'float(x$n["w"][0])', 'x$n["w"][0] = $v'),
    ],
    "bytes and arrays": [
        State("x$n = bytearray([int(8 * $a)])", "(x$n[0] / 8)", "x$n[0] = int(8 * $v)"),
        State('x$n = array.array("d", [$a])', "x$n[0]", "x$n[0] = $v"),
        State('y$n = array.array("d", [$a])\nx$n = memoryview(y$n)', "x$n[0]", "y$n[0] = $v"),
        State("x$n = ctypes.c_double($a)", "x$n.value", "x$n.value = $v"),
    ],
    "files": [
        State("x$n = io.StringIO(str($a))", "float(x$n.getvalue())", "x$n.seek(0); x$n.truncate(); x$n.write(str($v))"),
        State('x$n = pathlib.Path(tempfile.gettempdir(), f"wf_{os.getpid()}_$n"); x$n.write_text(str($a))', "float(x$n.read_text())",
              "x$n.write_text(str($v))", restore="x$n.unlink()"),
    ],
    "random numbers": [
        State(read="(0.5 + random.random())"),
        State("x$n = random.Random(int(8 * $a))", "(0.5 + x$n.random())"),
        State(read="(0.5 + np.random.rand())"),
        State("x$n = np.random.default_rng(int(8 * $a))", "float(0.5 + x$n.random())", keep="x$n.random()"),
        State(read="(0.5 + torch.rand(())).mean()"),
        State("x$n = torch.Generator().manual_seed(int(8 * $a))", "(0.5 + torch.rand(2, generator=x$n)).mean()", keep="x$n"),
        State(read="(0.5 + torch.randint(0, 3, (2,)).float().mean())"),
        State(read="random.choice([0.5, 1.0, $a])"),
        State("x$n = int(8 * $a)", "(torch.manual_seed(x$n), 0.5 + torch.rand(()))[1]", "x$n = int(8 * $v)", rebinds="x$n"),
    ],
    "clocks": [
        State("x$n = []", "(x$n.append(time.perf_counter()), $a)[1]", keep="len(set(x$n))"),
        State("x$n = set()\ndef f$n():\n    x$n.add(time.time_ns())\n    return $a", "f$n()", keep="len(x$n)"),
        State("x$n = [$a]\nclock$n = time.monotonic\ntime.monotonic = lambda: x$n[0]", "time.monotonic()", "x$n[0] = $v",
              restore="time.monotonic = clock$n"),
    ],
    "counters": [
        State("x$n = 0\ndef f$n():\n    $bind\n    x$n += 1\n    return $a / x$n", "f$n()", keep="x$n", rebinds="x$n", scope="closure"),
        State("x$n = 0\ndef f$n():\n    $bind\n    x$n += 1\n    return $a if x$n < 4 else 0.5", "f$n()", keep="x$n", rebinds="x$n",
              scope="global"),
        State(late="model.n$n = 0\ndef f$n():\n    model.n$n += 1\n    return $a / model.n$n", read="f$n()", keep="model.n$n"),
        State("x$n = [0]\ndef f$n():\n    x$n[0] += 1\n    return $a / x$n[0]", "f$n()", keep="x$n"),
    ],
    "prints": [State(read='(print("step", $n), $a)[1]', keep="None"),
    State("x$n = 0\ndef f$n():\n    $bind\n    x$n += 1\n    print(x$n)\n"
              "    return $a", "f$n()", keep="x$n", rebinds="x$n"),
        State("x$n = io.StringIO()", '(print("step", file=x$n), $a)[1]', keep="x$n.getvalue()")],
    "exceptions": [
        State("x$n = $a\ndef f$n():\n    if x$n > 1.9: raise ValueError(x$n)\n    return x$n", "f$n()", "x$n = $v", rebinds="x$n",
              keep="x$n",
              raises=True),
        State("x$n = $a\ndef f$n():\n    try:\n        if x$n > 0.6: raise KeyError(x$n)\n"
              "    except KeyError as error: return error.args[0]\n"
              "    return x$n", "f$n()", "x$n = $v", rebinds="x$n", keep="x$n"),
        State("x$n = [$a]", "(x$n[0] if x$n else {}[0])", "x$n.clear() if $v > 1.9 else x$n.append($v)", keep="x$n", raises=True),
    ],
    "threads": [
        State("x$n = threading.Event()\nif $a > 0.6: x$n.set()", "(1.0 if x$n.is_set() else 0.5)",
              "x$n.set() if $v > 0.6 else x$n.clear()"),
        State("x$n = queue.Queue()\nx$n.put($a)", "x$n.queue[0]", "x$n.get(); x$n.put($v)"),
        State("x$n = [$a]\ny$n = concurrent.futures.ThreadPoolExecutor(1)", "y$n.submit(lambda: x$n[0]).result()", "x$n[0] = $v",
              restore="y$n.shutdown()", keep="x$n"),
    ],
    "loggers": [
        State("x$n = logging.getLogger('wf_$n')\nx$n.setLevel(int(40 * $a))", "(x$n.level / 40)", "x$n.setLevel(int(40 * $v))",
              keep="x$n.level"),
        State("x$n = logging.getLogger('wf_$n')\nx$n.setLevel(int(40 * $a))", "(1.0 if x$n.isEnabledFor(logging.INFO) else 0.5)",
              "x$n.setLevel(int(40 * $v))", keep="x$n.level"),
    ],
    "classes of objects": [
        State("class A$n: w = 1.0\nclass B$n: w = 0.5\nx$n = A$n() if $a > 0.6 else B$n()", "x$n.w",
              "x$n.__class__ = A$n if $v > 0.6 else B$n"),
    ],
    "settings of Python": [
        State("decimal.getcontext().prec = int(16 * $a)", "(decimal.getcontext().prec / 16)", "decimal.getcontext().prec = int(16 * $v)",
              restore="decimal.getcontext().prec = 28"),
        State("builtins.wf_$n = $a", "wf_$n", "builtins.wf_$n = $v", restore="del builtins.wf_$n", scope="closure"),
    ],
}  # fmt: skip
