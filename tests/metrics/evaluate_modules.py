"""Two modules of `evaluate` that need no network, as a user's metrics may be; scikit-learn does the work."""

from typing import Any

import datasets
import evaluate
from sklearn import metrics


class _Offline(evaluate.Metric):
    """What `evaluate` asks of a module: a description and the types of its inputs. Predictions stay in memory."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"keep_in_memory": True, **settings})

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({name: datasets.Value("int32") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description=type(self).__doc__ or "", citation="", inputs_description="", features=features)


class Accuracy(_Offline):
    """Share of predictions that equal their reference."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(metrics.accuracy_score(references, predictions))}


class MatthewsCorrelation(_Offline):
    """Correlation of predicted and true classes."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"matthews_correlation": float(metrics.matthews_corrcoef(references, predictions))}
