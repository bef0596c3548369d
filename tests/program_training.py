"""What of a training loop's own things changes between steps and inside of them: a table as in ``program_states``.

The program's names: ``model`` (a ``Net`` with ``body``, a ``Body``, and ``heads``), ``optimizer``, ``step``, ``x`` and ``y`` of a batch.
"""

from __future__ import annotations

from tests.program_states import State

_GROUPS = (
    "torch.optim.SGD([dict(params=[*model.body.parameters()]), dict(params=[*model.heads.parameters()], lr=0.02)], "
    "lr=0.1, momentum=0.9, fused=True)"
)
_TENSOR = "x$n = torch.full((2,), $a)"

TRAINING: dict[str, list[State]] = {
    "optimizer: numbers": [
        State(write="optimizer.param_groups[0]['lr'] = 0.1 * $v"),
        State(write="for group in optimizer.param_groups: group['weight_decay'] = 0.1 * $v"),
        State(write="optimizer.param_groups[-1]['momentum'] = 0.4 * $v",
              optimizer="torch.optim.SGD($p, lr=0.1, momentum=0.9, fused=True)"),
        State(write="optimizer.param_groups[0]['betas'] = (0.4 * $v, 0.99)", optimizer="torch.optim.AdamW($p, lr=0.01, fused=True)"),
        State(write="optimizer.param_groups[0]['eps'] = 0.1 * $v", optimizer="torch.optim.Adam($p, lr=0.01, fused=True)"),
        State(write="optimizer.param_groups[0]['lr'].fill_(0.1 * $v)",
              optimizer="torch.optim.Adam($p, lr=torch.tensor(0.01), fused=True)"),
        State(write="optimizer.param_groups[0]['maximize'] = $v > 0.6"),
    ],
    "optimizer: read in the step": [
        State(read="(10 * optimizer.param_groups[0]['lr'])", write="optimizer.param_groups[0]['lr'] = 0.1 * $v"),
        State(read="(1.0 + optimizer.param_groups[0]['weight_decay'])", write="optimizer.param_groups[0]['weight_decay'] = 0.1 * $v"),
        State(read="(1.0 + len(optimizer.state))", write="", inside=False),
        State(read="(1.0 + sum(entry['exp_avg'].mean() for entry in optimizer.state.values()))", keep="None",
              optimizer="torch.optim.AdamW($p, lr=0.01, fused=True)"),
    ],
    "optimizer: groups": [
        State(optimizer=_GROUPS, write="a, b = (group['params'] for group in optimizer.param_groups[:2]); a[0], b[0] = b[0], a[0]"),
        State(optimizer=_GROUPS, write="optimizer.param_groups[0] = dict(optimizer.param_groups[0], lr=0.1 * $v)"),
        State(optimizer=_GROUPS, write="optimizer.param_groups.reverse()"),
        State(optimizer="torch.optim.SGD(model.body.parameters(), lr=0.1, momentum=0.9, fused=True)", inside=False,
              write="len(optimizer.param_groups) == 1 and optimizer.add_param_group(dict(params=list(model.heads.parameters()), lr=0.01))"),
        State(optimizer="torch.optim.SGD(model.body.parameters(), lr=0.1, momentum=0.9, fused=True)", inside=False, modes=("between",),
              write="optimizer.param_groups[0]['params'] = list(model.heads.parameters())"),
    ],
    "optimizer: state": [
        State(write="optimizer.state.clear()", inside=False),
        State(write="for entries in optimizer.state.values():\n    for entry in entries.values():\n"
              "        entry is None or entry.mul_(0.5)",
              inside=False),
        State(write="for p in list(optimizer.state): optimizer.state[p] = {k: v if v is None else v.clone() * 0.5 for k, v in"
              " optimizer.state[p].items()}", inside=False),
        State(write="for p in list(optimizer.state): optimizer.state[p] = {}", inside=False),
        State(write="optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))", inside=False),
    ],
    "schedulers": [
        State(late="x$n = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", write="x$n.step()", keep="x$n.state_dict()", inside=False),
        State(late="x$n = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", read="(1.0 / (1 + x$n.last_epoch))", write="x$n.step()",
              keep="x$n.last_epoch"),
        State(late="x$n = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))",
              read="(x$n.step(), 1.0)[1]", keep="x$n.get_last_lr()"),
        State(late="x$n = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)", read="(0.5 + x$n.get_last_lr()[0])",
              write="x$n.step()",
              keep="x$n.last_epoch"),
    ],
    "hooks: forward": [
        State("x$n = [$a]", late="model.body.register_forward_hook(lambda m, given, made: made * x$n[0])", write="x$n[0] = $v",
              keep="x$n"),
        State("x$n = [None]\ndef f$n(w): x$n[0] = model.body.register_forward_hook(lambda m, given, made: made * w)", late="f$n($a)",
              write="x$n[0].remove(); f$n($v)", keep="None"),
        State("x$n = [0]\ndef f$n(m, given, made): x$n[0] += 1", late="model.body.register_forward_hook(f$n)", keep="x$n"),
        State("x$n = []", late="model.body.register_forward_hook(lambda m, given, made: x$n.append(made.detach()))", keep="x$n"),
    ],
    "hooks: before forward": [
        State("x$n = [$a]", late="model.body.register_forward_pre_hook(lambda m, given: (given[0] * x$n[0],))", write="x$n[0] = $v",
              keep="x$n"),
        State(late="model.body.register_forward_pre_hook(lambda m, given: None); model.body.n$n = 0", keep="model.body.n$n",
              read="(setattr(model.body, 'n$n', model.body.n$n + 1), $a / model.body.n$n)[1]"),
    ],
    "hooks: backward": [
        State("x$n = [$a]", late="model.body.register_full_backward_hook(lambda m, given, made: (given[0] and given[0] * x$n[0],))",
              write="x$n[0] = $v", keep="x$n"),
        State("x$n = [$a]", late="model.body.linear.weight.register_hook(lambda g: g * x$n[0])", write="x$n[0] = $v", keep="x$n"),
        State("x$n = []", late="model.body.linear.weight.register_post_accumulate_grad_hook(lambda p: x$n.append(1))", keep="x$n"),
        State("x$n = [0]\ndef f$n(g): x$n[0] += 1", unpack="x = x * 1.0\nif x.requires_grad: x.register_hook(f$n)",
              batch="(x.clone().requires_grad_(), y)", keep="x$n"),
        State("x$n = [$a]", late="def f$n(*_): x$n[0] *= 0.5\noptimizer.register_step_pre_hook(f$n)", read="x$n[0]", keep="x$n"),
    ],
    "hooks: global": [
        State("x$n = [$a]\ny$n = nn.modules.module.register_module_forward_hook(\n"
              "    lambda m, given, made: made * x$n[0] if type(m) is nn.Linear else None)", write="x$n[0] = $v",
              restore="y$n.remove()", keep="x$n"),
        State("x$n = [None]\ndef f$n(w):\n    x$n[0] = nn.modules.module.register_module_forward_pre_hook(\n"
              "        lambda m, given: (given[0] * w,) if type(m) is nn.Linear else None)\nf$n($a)",
              write="x$n[0].remove(); f$n($v)", restore="x$n[0].remove()", keep="None"),
    ],
    "train and eval flags": [
        State(write="model.body.drop.train($v > 0.6)", keep="model.body.drop.training"),
        State(write="model.body.drop.train(not model.body.drop.training)", keep="model.body.drop.training"),
        State(write="model.body.norm.train($v > 0.6)", keep="model.body.norm.training"),
        State(write="model.body.train($v > 0.6)", keep="model.body.training"),
        State(read="(1.0 if $m.body.training else 0.5)", write="model.body.training = $v > 0.6"),
        State(write="model.body.drop.p = 0.4 * $v", keep="model.body.drop.p"),
    ],
    "requires_grad": [
        State(write="model.body.requires_grad_($v > 0.6)", keep="None", inside=False),
        State(write="model.body.linear.bias.requires_grad = $v > 0.6", keep="None", inside=False),
        State(read="(1.0 if $m.heads['b'].weight.requires_grad else 0.5)", write="model.heads['b'].requires_grad_($v > 0.6)"),
    ],
    "buffers": [
        State(late="model.register_buffer('g$n', torch.tensor($a))", read="$m.g$n", write="model.g$n = torch.tensor($v)"),
        State(late="model.register_buffer('g$n', torch.tensor($a))", read="$m.g$n.clone()", write="model.g$n.fill_($v)"),
        State(late="model.register_buffer('g$n', torch.tensor($a))", read="$m.g$n", write="model.g$n.data = torch.tensor($v)",
              inside=False),
        State(late="model.register_buffer('g$n', torch.tensor($a))", read="($m.g$n.mul_(0.75), $m.g$n.clone())[1]"),
        State(late="def f$n():\n"
              "    if not hasattr(model, 'g$n'): model.register_buffer('g$n', torch.full((2,), $a))\n    return model.g$n.mean()",
              read="f$n()"),
        State(late="model.register_buffer('g$n', None)", read="(0.5 if $m.g$n is None else $m.g$n)",
              write="model.g$n = torch.tensor($v)"),
    ],
    "memory of parameters": [
        State(write="model.body.linear.weight.data = model.body.linear.weight.data * $v", keep="None", inside=False),
        State(write="model.body.linear.weight.data.mul_($v)", keep="None", inside=False),
        State(write="with torch.no_grad(): model.body.linear.weight.mul_($v)", keep="None", inside=False),
        State(write="model.body.linear.weight.data = model.body.linear.weight.data.t()", keep="None", inside=False),
        State(write="model.body.linear.weight.detach().numpy()[0] *= $v", keep="None", inside=False),
    ],
    "modules replaced": [
        State(write="model.heads['b'].weight = model.heads['a'].weight", keep="None", inside=False, modes=("between",)),
        State(write="model.act = [nn.Tanh(), nn.ReLU()][$v > 0.6]", keep="None"),
        State(write="model.extra.append(nn.Softplus())", keep="len(model.extra)", inside=False, modes=("between",)),
        State(late="plain$n = Body.forward\ndef f$n(w): return lambda self, x: plain$n(self, x) * w\nBody.forward = f$n($a)",
              write="Body.forward = f$n($v)", keep="None"),
        State(late="plain$n = model.body.forward\ndef f$n(w): return lambda x: plain$n(x) * w\nmodel.body.forward = f$n($a)",
              write="model.body.forward = f$n($v)", keep="None"),
    ],
    "tensors from outside": [
        State(_TENSOR, "x$n.mean()", "x$n.fill_($v)", keep="x$n"),
        State(_TENSOR, "x$n.mean()", "x$n.data.fill_($v)", keep="x$n"),
        State(_TENSOR, "x$n.mean()", "x$n.numpy()[...] = $v", keep="x$n"),
        State(_TENSOR, "x$n.mean()", "x$n = torch.full((2,), $v)", keep="x$n", rebinds="x$n"),
        State(_TENSOR, "x$n.mean()", "x$n.data = torch.full((2,), $v)", keep="x$n", inside=False),
        State(_TENSOR, "x$n.mean()", "x$n.data = torch.full((3,), $v)", keep="x$n", inside=False),
        State("x$n = [torch.full((2,), $a)]", "x$n[0].mean()", "x$n[0] = 0.5 * x$n[0] + 0.5 * $v", keep="x$n"),
        State("x$n = torch.full((2,), $a)", "(x$n.mul_(0.75), x$n.mean())[1]", keep="x$n"),
        State("x$n = torch.tensor($a)", "x$n.item()", "x$n.fill_($v)", keep="x$n"),
        State(_TENSOR, "(1.0 if x$n.requires_grad else 0.5)", "x$n.requires_grad_($v > 0.6)", keep="x$n"),
    ],
    "tensors' attributes": [
        State("x$n = torch.ones(2); x$n.w = $a", "(x$n.mean() * x$n.w)", "x$n.w = $v", keep="x$n"),
        State(late="model.body.linear.weight.w$n = $a", read="$m.body.linear.weight.w$n", write="model.body.linear.weight.w$n = $v"),
        State("x$n = torch.ones(2); x$n.w = $a", "x$n.w", "x$n.w = $v", keep="x$n"),
    ],
    "batch: numbers": [
        State("x$n = $a", "w$n", "x$n = $v", batch="(x, y, x$n)", unpack="w$n = batch[2]", rebinds="x$n"),
        State("x$n = $a", "(w$n / 8)", "x$n = $v", batch="(x, y, int(8 * x$n))", unpack="w$n = batch[2]", rebinds="x$n"),
    ],
    "batch: strings": [
        State("x$n = $a", "(1.0 if w$n == 'a' else 0.5)", "x$n = $v", batch="[x, y, 'a' if x$n > 0.6 else 'b']", unpack="w$n = batch[2]",
              rebinds="x$n"),
        State("x$n = $a", "{'a': 1.0, 'b': 0.5}[w$n]", "x$n = $v", unpack="x, y, w$n = batch['x'], batch['y'], batch['task']",
              batch="{'x': x, 'y': y, 'task': 'a' if x$n > 0.6 else 'b'}", rebinds="x$n"),
    ],
    "batch: order of keys": [
        State("x$n = $a", "(w$n.mean())", "x$n = $v", rebinds="x$n",
              unpack="x, y = batch['x'], batch['y']; w$n = next(iter(batch.values())).float()",
              batch="{'x': x, 'y': y} if x$n > 0.6 else {'y': y, 'x': x}"),
    ],
    "batch: objects": [
        State("class C$n: pass\nx$n = C$n(); x$n.w = $a", "batch[2].w", "x$n.w = $v", batch="(x, y, x$n)"),
        State("@dataclasses.dataclass\nclass C$n:\n    x: object\n    y: object\n    w: float\nx$n = $a", "w$n", "x$n = $v",
              batch="C$n(x, y, x$n)",
              unpack="x, y, w$n = batch.x, batch.y, batch.w", rebinds="x$n"),
        State("N$n = collections.namedtuple('N$n', 'x y w')\nx$n = $a", "w$n", "x$n = $v", batch="N$n(x, y, x$n)",
              unpack="x, y, w$n = batch",
              rebinds="x$n"),
        State("class D$n(dict): pass\nx$n = $a\ndef f$n(x, y):\n    made = D$n(x=x, y=y); made.w = x$n\n    return made", "w$n",
              "x$n = $v",
              batch="f$n(x, y)", unpack="x, y, w$n = batch['x'], batch['y'], batch.w", rebinds="x$n"),
    ],
    "batch: tensors": [
        State("x$n = $a", "(1.0 if x.requires_grad else 0.5)", "x$n = $v", batch="(x.clone().requires_grad_(x$n > 0.6), y)",
              rebinds="x$n"),
        State("x$n = []\ndef f$n(x):\n    x$n.append(x)\n    return x", batch="(f$n(x.clone().requires_grad_()), y)",
              keep="[one.grad for one in x$n]", modes=("never",)),
        State("x$n = $a\ndef f$n(x):\n    x.w = x$n\n    return x", "getattr(batch[0], 'w', 1.0)", "x$n = $v",
              batch="(f$n(x.clone()), y)",
              rebinds="x$n"),
        State("x$n = $a", "(x.shape[0] / 4)", "x$n = $v", batch="(x[: int(2 + x$n)], y[: int(2 + x$n)])", rebinds="x$n"),
        State("x$n = $a", "(1.0 if x.is_contiguous() else 0.5)", "x$n = $v", rebinds="x$n",
              batch="(x if x$n > 0.6 else x.t().contiguous().t(), y)"),
        State("x$n = torch.empty(4, 4)", batch="(x$n.copy_(x), y)", modes=("never",), keep="x$n"),
    ],
    "default data type": [
        State(late="torch.set_default_dtype(torch.float64 if $a > 0.6 else torch.float32)", read="(torch.ones(2).element_size() / 8)",
              write="torch.set_default_dtype(torch.float64 if $v > 0.6 else torch.float32)",
              restore="torch.set_default_dtype(torch.float32)"),
        State(read="(torch.tensor(0.1) + torch.ones(2)).double().mean()", restore="torch.set_default_dtype(torch.float32)",
              write="torch.set_default_dtype(torch.float64 if $v > 0.6 else torch.float32)", keep="torch.get_default_dtype()"),
    ],
    "gradient mode": [
        State("x$n = $a", "(1.0 if torch.is_grad_enabled() else 0.5)", "x$n = $v", around="torch.set_grad_enabled(x$n > 0.6)",
              rebinds="x$n"),
        State("x$n = $a\ndef f$n(m, x):\n    with torch.set_grad_enabled(x$n > 0.6): return m.body(x).mean()", "f$n(model, x)",
              "x$n = $v",
              rebinds="x$n", keep="x$n"),
        State("x$n = $a", "(1.0 if torch.is_inference_mode_enabled() else 0.5)", "x$n = $v", rebinds="x$n"),
    ],
    "autocast": [
        State("x$n = $a", "", "x$n = $v", around="torch.autocast('cpu', torch.bfloat16, enabled=x$n > 0.6)", rebinds="x$n", keep="x$n"),
        State("x$n = $a\ndef f$n(m, x):\n"
              "    with torch.autocast('cpu', torch.bfloat16, enabled=x$n > 0.6): return m.body(x).float().mean()",
              "f$n(model, x)", "x$n = $v", rebinds="x$n", keep="x$n"),
        State("x$n = $a", "(1.0 if torch.is_autocast_enabled('cpu') else 0.5)", "x$n = $v", rebinds="x$n",
              around="torch.autocast('cpu', torch.bfloat16, enabled=x$n > 0.6)"),
    ],
    "flags of torch": [
        State("torch.use_deterministic_algorithms($a > 0.6, warn_only=True)",
              "(1.0 if torch.are_deterministic_algorithms_enabled() else 0.5)",
              "torch.use_deterministic_algorithms($v > 0.6, warn_only=True)", restore="torch.use_deterministic_algorithms(False)"),
        State("torch.set_float32_matmul_precision('highest' if $a > 0.6 else 'high')",
              restore="torch.set_float32_matmul_precision('highest')",
              read="(1.0 if torch.get_float32_matmul_precision() == 'high' else 0.5)",
              write="torch.set_float32_matmul_precision('highest' if $v > 0.6 else 'high')"),
        State("torch.backends.mkldnn.flags; x$n = torch.backends.cudnn.benchmark; torch.backends.cudnn.benchmark = $a > 0.6",
              "(1.0 if torch.backends.cudnn.benchmark else 0.5)", "torch.backends.cudnn.benchmark = $v > 0.6",
              restore="torch.backends.cudnn.benchmark = x$n"),
    ],
    "logs": [
        State("x$n = []", late="after.append(lambda loss: x$n.append(loss.detach()))", keep="x$n"),
        State("x$n = collections.deque(maxlen=2)", late="after.append(lambda loss: x$n.append(loss.detach()))", keep="x$n"),
        State("x$n = []", late="after.append(lambda loss: x$n.append(loss.item()))", keep="x$n"),
        State("x$n = {}", late="after.append(lambda loss: x$n.update(loss=loss.detach()))", keep="x$n"),
        State("x$n = torch.zeros(())", late="after.append(lambda loss: x$n.add_(loss.detach()))", keep="x$n"),
    ],
    "averages and teachers": [
        State(last="x$n = copy.deepcopy(model)", read="x$n(x).detach().mean()", keep="x$n",
              write="with torch.no_grad():\n    for mine, its in zip(x$n.parameters(), model.parameters()): mine.lerp_(its, 0.25)",
              inside=False),
        State(last="x$n = torch.optim.swa_utils.AveragedModel(model)", write="x$n.update_parameters(model)", inside=False, keep="x$n"),
        State(last="x$n = copy.deepcopy(model)", read="x$n(x).detach().mean()", keep="x$n",
              write="x$n.load_state_dict(model.state_dict())",
              inside=False),
    ],
    "autograd functions": [
        State("class G$n(torch.autograd.Function):\n    w = $a\n    @staticmethod\n    def forward(ctx, x): return x.clone()\n"
              "    @staticmethod\n    def backward(ctx, g): return g * G$n.w", "(1.0 + G$n.apply(model.body.linear.weight).mean())",
              "G$n.w = $v", keep="G$n.w"),
        State("x$n = [$a]\nclass G$n(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return x.clone()\n"
              "    @staticmethod\n    def backward(ctx, g): return g * x$n[0]", "(1.0 + G$n.apply(model.body.linear.weight).mean())",
              "x$n[0] = $v", keep="x$n"),
    ],
    "data sets": [
        State("x$n = torch.utils.data.DataLoader([1, 2])\nx$n.w = $a", "x$n.w", "x$n.w = $v"),
        State("class D$n(torch.utils.data.Dataset): w = $a\nx$n = D$n()", "x$n.w", "x$n.w = $v"),
        State("x$n = torch.utils.data.DistributedSampler([1, 2], 2, 0)", "(0.5 + x$n.epoch)", "x$n.set_epoch(int(4 * $v))"),
    ],
    "modes of torch": [
        State("x$n = [$a]\nclass M$n(torch.overrides.TorchFunctionMode):\n"
              "    def __torch_function__(self, f, types, args=(), kwargs=None):\n"
              "        made = f(*args, **(kwargs or {}))\n        return made * x$n[0] if f is F.linear else made", write="x$n[0] = $v",
              around="M$n()", keep="x$n"),
    ],
    "parametrizations": [
        State("class P$n(nn.Module):\n    def forward(self, w): return w * self.k",
              write="model.body.linear.parametrizations.weight[0].k = $v",
              late="p$n = P$n(); p$n.k = $a; nn.utils.parametrize.register_parametrization(model.body.linear, 'weight', p$n)",
              keep="p$n.k"),
    ],
}  # fmt: skip
