"""Training loops as people write them end with the same bits as in eager training."""

from __future__ import annotations

import pytest

from tests.program_runs import compare
from tests.training_loops import LOOPS

# Those that draw Python's or NumPy's random numbers, or change what is no tensor, have to run eagerly.
CAPTURED = {
    "gan_with_turns", "wasserstein_with_penalty", "dqn", "ppo", "inner_loop_of_maml", "mean_teacher", "curriculum_by_epoch",
    "distillation", "stochastic_weight_averaging", "lookahead", "trainer_with_state", "layers_unfrozen_one_by_one",
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_loop(name: str) -> None:
    """Twice, for the second trial may share what the first one captured."""
    found = compare(LOOPS[name], trials=2)
    assert not found.errors
    assert not found.differences, found.differences[:5]
    assert found.captured == found.steps or name not in CAPTURED, found.reasons
