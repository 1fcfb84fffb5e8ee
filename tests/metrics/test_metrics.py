"""Metrics from sums against scikit-learn on all predictions; metrics that are not built in."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from sklearn import metrics as reference

from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch
from toolkit.metrics.classes import CLASS_METRICS, LABEL_METRICS, class_sums, counts_of_classes, counts_of_labels, label_sums
from toolkit.metrics.classification import NUMBER_METRICS, classification_metrics
from toolkit.metrics.external import flat_metrics, names_of
from toolkit.metrics.metric import Metrics
from toolkit.training.evaluation import eval_with_gather

SCORES = {"precision": reference.precision_score, "recall": reference.recall_score, "f1": reference.f1_score}


def added_up(make: Any, predictions: np.ndarray, references: np.ndarray, num_labels: int) -> dict[str, np.ndarray]:
    """Sums of micro-batches of 5, added up."""
    pieces = [
        make(torch.from_numpy(predictions[i : i + 5]), torch.from_numpy(references[i : i + 5]), num_labels)
        for i in range(0, len(references), 5)
    ]
    return {name: sum(piece[name].numpy() for piece in pieces) for name in pieces[0]}


def quiet(function: Any, *args: Any, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's, about classes that do not occur
        return function(*args, **settings)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("examples", [1, 2, 7, 97])
@pytest.mark.parametrize("num_labels", [2, 3, 12])
def test_class_metrics_are_those_of_scikit_learn(num_labels: int, examples: int, seed: int) -> None:
    """With few examples most classes do not occur, or only as a prediction.

    Fails when: the macro average is taken over all classes of the model; references and predictions change places.
    """
    random_numbers = np.random.default_rng(seed)
    y, p = random_numbers.integers(0, num_labels, (2, examples))
    counts = counts_of_classes(added_up(class_sums, p, y, num_labels))
    wanted = {
        "accuracy": reference.accuracy_score(y, p),
        "balanced_accuracy": quiet(reference.balanced_accuracy_score, y, p),
        "matthews_correlation": quiet(reference.matthews_corrcoef, y, p),
    }
    for name, score in SCORES.items():
        wanted[name] = wanted[f"{name}_macro"] = quiet(score, y, p, average="macro", zero_division=0)
        for average in ("micro", "weighted"):
            wanted[f"{name}_{average}"] = quiet(score, y, p, average=average, zero_division=0)
        if num_labels == 2:
            wanted[f"{name}_binary"] = quiet(score, y, p, average="binary", zero_division=0)
        each = quiet(score, y, p, average=None, labels=list(range(num_labels)), zero_division=0)
        wanted[f"{name}_per_class"] = list(each)
    assert wanted.keys() == {name for name in CLASS_METRICS if num_labels == 2 or not name.endswith("_binary")}
    for name, value in wanted.items():
        assert CLASS_METRICS[name](counts) == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("examples", [1, 7, 97])
def test_metrics_of_several_classes_are_those_of_scikit_learn(examples: int) -> None:
    """Fails when: accuracy counts single classes instead of whole examples; precision divides by the references."""
    random_numbers = np.random.default_rng(0)
    y, p = (random_numbers.random((2, examples, 5)) < 0.4).astype(np.int64)
    counts = counts_of_labels(added_up(label_sums, p, y, 5))
    wanted = {"accuracy": reference.accuracy_score(y, p)}
    for name, score in SCORES.items():
        wanted[name] = wanted[f"{name}_macro"] = quiet(score, y, p, average="macro", zero_division=0)
        for average in ("micro", "weighted"):
            wanted[f"{name}_{average}"] = quiet(score, y, p, average=average, zero_division=0)
        each = quiet(score, y, p, average=None, zero_division=0)
        wanted[f"{name}_per_class"] = list(each)
    assert wanted.keys() == LABEL_METRICS.keys()
    for name, value in wanted.items():
        assert LABEL_METRICS[name](counts) == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize(
    ("classes", "keys"),
    [
        (["sci tech", "7"], ["f1_class_sci_tech", "f1_class_7"]), ([], ["f1_class_0", "f1_class_1"]),
        (["a b", "a_b"], ["f1_class_0", "f1_class_1"]),
    ],
)  # fmt: skip
def test_metrics_of_single_classes_have_the_names_of_the_classes(classes: list[str], keys: list[str]) -> None:
    """Fails when: the names are not passed on; white space stays, which ends a name; two classes share one metric."""
    metrics = classification_metrics(["f1_per_class"], 2, "single_label", classes)
    sums = {"loss": np.array(1.0), "weight": np.array(1.0), "confusion": np.array([[3, 1], [0, 2]])}
    assert metrics.finalize(sums) == {"loss": 1.0, keys[0]: 6 / 7, keys[1]: 4 / 5}


class Told(torch.nn.Module):
    """A model whose logits are its inputs."""

    def forward(self, values: torch.Tensor) -> Any:
        return SimpleNamespace(logits=values[:, None])


def metrics_of_numbers(p: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Of a split that is evaluated in micro-batches of 5."""
    pieces = [list(range(len(y)))[i : i + 5] for i in range(0, len(y), 5)]
    loader = [
        Batch([{"values": torch.from_numpy(p[piece]), "labels": torch.from_numpy(y[piece])}], {}, [True], indices=[piece])
        for piece in pieces
    ]
    metrics = classification_metrics(list(NUMBER_METRICS), 1, "regression")
    return eval_with_gather(Accelerator(cpu=True), Told(), loader, metrics, prefix="")


@pytest.mark.parametrize("mean", [0.0, 100.0, 1e6, -1e9])
@pytest.mark.parametrize("examples", [2, 7, 97])
def test_metrics_of_numbers_are_those_of_scikit_learn(examples: int, mean: float) -> None:
    """Also where the mean is large next to the spread, as in years, prices and seconds since 1970.

    Fails when: r2 and pearson are made of sums of squares, or errors are added up in float32.
    """
    random_numbers = np.random.default_rng(0)
    dtype = np.float32 if abs(mean) < 1e6 else np.float64
    y = (mean + random_numbers.normal(size=examples)).astype(dtype)
    p = (y + random_numbers.normal(size=examples)).astype(dtype)
    found = metrics_of_numbers(p, y)
    y, p = y.astype(np.float64), p.astype(np.float64)
    wanted = {
        "mse": reference.mean_squared_error(y, p), "rmse": reference.root_mean_squared_error(y, p),
        "mae": reference.mean_absolute_error(y, p), "r2": reference.r2_score(y, p), "pearson": np.corrcoef(y, p)[0, 1],
    }  # fmt: skip
    assert wanted.keys() == NUMBER_METRICS.keys() == found.keys() - {"loss"}
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("constant", [0.5, 0.1])
def test_metrics_of_constant_numbers_follow_the_conventions_of_scikit_learn(constant: float) -> None:
    """0.1 seven times leaves a variance of rounding, which is none. (scikit-learn itself says -5e33 there.)

    Fails when: deviations are from the mean alone, without a first number taken off.
    """
    for distance, wanted in ((0.0, 1.0), (1.0, 0.0)):
        found = metrics_of_numbers(np.full(7, constant + distance), np.full(7, constant))
        assert found["r2"] == wanted == reference.r2_score(np.full(7, 0.5), np.full(7, 0.5 + distance))
        assert np.isnan(found["pearson"])


@pytest.mark.parametrize(
    ("names", "classes", "problem", "parts"),
    [
        (["acuracy"], 3, "single_label", ["acuracy", "Did you mean accuracy", "network"]),
        (["mse"], 3, "single_label", ["mse", "--problem-type regression", "accuracy"]),
        (["f1"], 1, "regression", ["f1", "single_label", "mse"]),
        (["matthews_correlation"], 3, "multi_label", ["matthews_correlation", "multi_label"]),
        (["f1_binary"], 3, "single_label", ["f1_binary", "two classes", "Type f1."]),
        (["nowhere/metric.py"], 3, "single_label", ["nowhere/metric.py", "not a metric script"]),
    ],
)
def test_a_metric_that_cannot_be_computed_is_refused_when_it_is_named(
    names: list[str], classes: int, problem: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before training, with what would be right.

    Fails when: modules are loaded at the first evaluation.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Refusal) as refused:
        classification_metrics(names, classes, problem)
    for part in parts:
        assert part in str(refused.value)


SCRIPT = '''
import datasets
import evaluate

class Hits(evaluate.Metric):
    """Right predictions, counted."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        hits = sum(p == r for p, r in zip(predictions, references))
        return {"hits": hits, "predicted_twos": predictions.count(2), "accuracy": -1.0}
'''


def rows(predictions: list[int], references: list[int]) -> dict[str, np.ndarray]:
    ones = np.ones(len(predictions))
    return {"loss": ones, "weight": ones, "predictions": np.array(predictions), "references": np.array(references)}


def finalized(metrics: Metrics) -> dict[str, float]:
    assert metrics.gather is not None
    return metrics.finalize(rows([0, 1, 2, 2], [0, 1, 1, 2]))


def test_a_metric_script_of_the_users_gets_all_predictions_beside_built_in_metrics(tmp_path: Path) -> None:
    """A key that is taken does not overwrite the built-in metric.

    Fails when: flat_metrics ignores what is taken; the module gets references as predictions.
    """
    script = tmp_path / "hits.py"
    script.write_text(SCRIPT)
    name = str(script)
    metrics = finalized(classification_metrics(["accuracy", name], 3))
    assert metrics["hits"] == 3.0
    assert metrics["predicted_twos"] == 2.0
    assert metrics["accuracy"] == 0.75
    assert metrics["hits_accuracy"] == -1.0
    assert metrics["loss"] == 1.0


def test_a_module_that_cannot_take_the_predictions_is_refused_at_once(tmp_path: Path) -> None:
    """Two lists of classes are no input for a module of single classes.

    Fails when: modules are not tried on two examples.
    """
    script = tmp_path / "hits.py"
    script.write_text(SCRIPT)
    with pytest.raises(Refusal, match=r"hits\.py: "):
        classification_metrics([str(script)], 3, "multi_label")


def test_functions_and_combinations_of_modules_may_be_given_in_place_of_a_name() -> None:
    """Two modules, combined by evaluate.

    Fails when: predictions and references are passed in the other order.
    """
    import evaluate

    from tests.metrics.evaluate_modules import Accuracy, MatthewsCorrelation

    def asymmetric(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        return {"predicted_twos": float((predictions == 2).sum()), "twos": float((references == 2).sum())}

    combined = evaluate.combine([Accuracy(), MatthewsCorrelation()])
    metrics = finalized(classification_metrics([combined, asymmetric], 3))
    assert (metrics["predicted_twos"], metrics["twos"]) == (2.0, 1.0)
    assert metrics["accuracy"] == 0.75
    assert metrics["matthews_correlation"] == pytest.approx(reference.matthews_corrcoef([0, 1, 1, 2], [0, 1, 2, 2]))


def test_one_name_or_function_is_a_list_of_one() -> None:
    """Fails when: `names_of` is left out: the letters of the name are looked for, and a function is refused as no list."""
    assert finalized(classification_metrics("pearson", 1, "regression")).keys() == {"loss", "pearson"}
    assert finalized(classification_metrics(lambda predictions, references: {"rows": len(references)}, 3)).keys() == {"loss", "rows"}
    module: Any = SimpleNamespace(name="mine", compute=lambda **_: {})
    assert [names_of(each) for each in (module, {"f1"}, ("f1",), iter(["f1"]), None)] == [[module], ["f1"], ["f1"], ["f1"], []]


def test_results_of_any_shape_become_numbers_by_name() -> None:
    """Fails when: arrays are dropped, or a note in words stops the evaluation."""
    result = {"each": np.array([0.5, 1.0]), "note": "words", "score": np.float32(2)}
    assert flat_metrics("mine", result, {"score"}) == {"each_0": 0.5, "each_1": 1.0, "mine_score": 2.0}
    assert flat_metrics("mine", 3, ()) == {"mine": 3.0}


def test_metrics_observe_in_one_way() -> None:
    """Fails when: both may be given, which would be two forward passes for each micro-batch, or `__repr__` is removed."""
    assert repr(classification_metrics(["f1"], 2)) == "Metrics(update: classification_metrics.<locals>.<lambda>)"
    with pytest.raises(ValueError, match="one of the two"):
        Metrics(update=None, finalize=lambda sums: {})
