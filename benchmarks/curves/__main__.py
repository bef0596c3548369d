"""Records the curves of a space; see the package."""

from __future__ import annotations

import argparse

import optuna

import waterflow as wf
from benchmarks import curves
from benchmarks.spaces import SPACES


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(curves.__doc__ or "").split("\n")[0])
    parser.add_argument("space", choices=sorted(SPACES))
    parser.add_argument("--trials", type=int, default=300)
    asked = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = SPACES[asked.space]
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0), pruner=optuna.pruners.NopPruner()
    )
    summary = wf.optimize(study, space.job, asked.trials, keep_weights="none", show_progress_bar=True)
    steps = {trial.number: result.steps for trial, result in zip(study.trials, summary.results)}
    curves.save(
        asked.space,
        [
            curves.Recorded(
                trial.params,
                [round(trial.intermediate_values[i], 6) for i in range(space.epochs)],
                steps[trial.number] / space.epochs,
            )
            for trial in study.trials
        ],
    )


if __name__ == "__main__":
    main()
