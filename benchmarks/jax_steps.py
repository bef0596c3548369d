"""The perceptron of ``benchmarks.door`` in JAX: eight jobs of 2,000 steps, one after the other and at once (``vmap``).

A process of its own, which imports no torch; ``pip install jax optax`` is no part of this project's environments. An epoch is one
``lax.scan`` over the batches, compiled before the clock starts. Prints microseconds for each job's step, by way, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

JOBS, STEPS, REPEATS = 8, 2000, 5


def main() -> int:
    """Measure each way."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adamw(1e-3, weight_decay=1e-2)
    sizes = ((64, 128), (128, 64), (64, 10))

    def parameters(key: Any) -> Any:
        keys = jax.random.split(key, len(sizes))
        return [
            (jax.random.uniform(k, shape, minval=-1, maxval=1) / shape[0] ** 0.5, jnp.zeros(shape[1]))
            for k, shape in zip(keys, sizes)
        ]

    def loss(layers: Any, batch: Any) -> Any:
        x, y = batch
        for number, (weight, bias) in enumerate(layers):
            x = x @ weight + bias
            x = jax.nn.relu(x) if number < len(layers) - 1 else x
        return jnp.mean((x - y) ** 2)

    def step(state: Any, batch: Any) -> Any:
        layers, moments = state
        value, gradients = jax.value_and_grad(loss)(layers, batch)
        updates, moments = optimizer.update(gradients, moments, layers)
        return (optax.apply_updates(layers, updates), moments), value

    def epoch(state: Any, batches: Any) -> Any:
        return jax.lax.scan(step, state, batches)

    def begin(key: Any) -> Any:
        layers = parameters(key)
        return layers, optimizer.init(layers)

    keys = jax.random.split(jax.random.PRNGKey(0), JOBS)
    batches = jnp.ones((STEPS, 64, 64)), jnp.ones((STEPS, 64, 10))
    one, all_at_once = jax.jit(epoch), jax.jit(jax.vmap(epoch, in_axes=(0, None)))
    states, together = [begin(key) for key in keys], jax.vmap(begin)(keys)

    def in_turn() -> Any:
        return [one(state, batches)[1] for state in states]

    ways = {"lax.scan, one after the other": in_turn, "lax.scan and vmap": lambda: all_at_once(together, batches)[1]}
    told: dict[str, list[float]] = {}
    for name, run in ways.items():
        jax.block_until_ready(run())  # compiles
        told[name] = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            jax.block_until_ready(run())
            told[name].append((time.perf_counter() - began) / (JOBS * STEPS) * 1e6)
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
