"""`evaluate` modules that need no network, for `evaluate.combine` and whatever else takes a module.

    import evaluate
    from toolkit.metrics.modules import Accuracy, F1
    evaluate.combine([Accuracy(), F1()]).compute(predictions=[0, 1], references=[0, 0])

Inputs and keyword arguments are those of the Hub's modules of the same names; scikit-learn does the work. A recipe needs none
of them: its built-in metrics are sums and hold no predictions.
"""

import math
from typing import Any

import datasets
import evaluate
from sklearn import metrics


class _Offline(evaluate.Metric):
    """What `evaluate` asks of a module: a description and the types of its inputs. Predictions stay in memory."""

    input_types = ("int32", "int32")

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"keep_in_memory": True, **settings})

    def _info(self) -> evaluate.MetricInfo:
        predictions, references = (datasets.Value(kind) for kind in self.input_types)
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "", citation="", inputs_description="predictions and references, one an example",
            features=datasets.Features({"predictions": predictions, "references": references}),
        )  # fmt: skip


def _plain(value: Any) -> Any:
    """A float, or with average=None the array of classes."""
    return float(value) if getattr(value, "ndim", 0) == 0 else value


class Accuracy(_Offline):
    """Share of predictions that equal their reference."""

    def _compute(self, predictions: Any, references: Any, **settings: Any) -> dict[str, Any]:
        return {"accuracy": _plain(metrics.accuracy_score(references, predictions, **settings))}


class F1(_Offline):
    """Harmonic mean of precision and recall; average="binary" (of class 1) unless told otherwise."""

    def _compute(self, predictions: Any, references: Any, **settings: Any) -> dict[str, Any]:
        return {"f1": _plain(metrics.f1_score(references, predictions, **settings))}


class Precision(_Offline):
    """Share of the predictions of a class that are right; average="binary" (of class 1) unless told otherwise."""

    def _compute(self, predictions: Any, references: Any, **settings: Any) -> dict[str, Any]:
        return {"precision": _plain(metrics.precision_score(references, predictions, **settings))}


class Recall(_Offline):
    """Share of the examples of a class that are found; average="binary" (of class 1) unless told otherwise."""

    def _compute(self, predictions: Any, references: Any, **settings: Any) -> dict[str, Any]:
        return {"recall": _plain(metrics.recall_score(references, predictions, **settings))}


class MatthewsCorrelation(_Offline):
    """Correlation of predicted and true classes, 0 for guessing, for any number of classes."""

    def _compute(self, predictions: Any, references: Any, **settings: Any) -> dict[str, Any]:
        return {"matthews_correlation": _plain(metrics.matthews_corrcoef(references, predictions, **settings))}


class Perplexity(_Offline):
    """exp of the mean over tokens. predictions: each text's summed negative log-likelihood in nats; references: its tokens."""

    input_types = ("float64", "int64")

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        return {"perplexity": math.exp(math.fsum(predictions) / sum(references))}
