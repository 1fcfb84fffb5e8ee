"""Which settings matter: PED-ANOVA (Watanabe et al., 2023, arXiv:2304.10255) by Optuna, from the trials that have a value."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence

from toolkit.config import Refusal
from toolkit.sweeps.journal import Plan
from toolkit.sweeps.results import Trial, result_of
from toolkit.sweeps.space import read_space
from toolkit.sweeps.strategies import Result, study_of

LEAST_TRIALS = 10


def importances(trials: Sequence[Trial], plan: Plan) -> dict[str, float]:
    """For each setting that all trials have its share of what tells the best tenth of them from the rest; they sum to 1.

    Raises:
        Refusal: Optuna is not installed, or the trials are too few or too much alike.
    """
    found = [(trial.settings, result_of(trial, plan)) for trial in trials if result_of(trial, plan).values]
    names = [each.name for each in read_space(plan.search) if all(each.name in settings for settings, _ in found)]
    varied = [name for name in names if len({settings[name] for settings, _ in found}) > 1]
    if len(found) < LEAST_TRIALS or len(varied) < 2:
        raise Refusal(f"needs {LEAST_TRIALS} trials with a value that differ in two settings; {len(found)} have one")
    if importlib.util.find_spec("optuna") is None:
        raise Refusal("needs optuna, which is not installed; type pip install optuna")
    # a trial that was stopped early has a value too
    whole = [(settings, Result(result.values, result.violations)) for settings, result in found]
    study = study_of(read_space(plan.search), whole, [each.maximize for each in plan.objectives])
    import optuna

    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    sign = -1 if plan.objectives[0].maximize else 1
    with warnings.catch_warnings():  # it says that it looks at low values
        warnings.simplefilter("ignore")
        shares = optuna.importance.get_param_importances(
            study, evaluator=evaluator, params=varied, target=lambda trial: sign * trial.values[0]
        )
    return {str(name): float(share) for name, share in shares.items()}
