"""Metrics over N examples are those of one process with batch size 1, for any layout, world size, batch size and remainder."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

RUN = str(Path(__file__).with_name("evaluation_run.py"))
EXAMPLES = (1, 5, 11)
KINDS = ("language model", "rows of a user's own", "classes", "gathered classes", "several classes", "numbers")
ROUNDED = ("loss", "perplexity", "bits_per_byte", "mse", "rmse", "mae", "r2", "pearson")  # all others are of whole numbers
LAYOUTS = {
    "ddp": [],
    "zero3": ["--deepspeed", "ds_config.json"],  # every parameter sharded, also the small ones
    "fsdp2": ["--fsdp"],
}


def run(tiny: Any, ranks: int, layout: str = "ddp") -> list[dict[str, Any]]:
    """What each rank found."""
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    (tiny.folder / "ds_config.json").write_text(json.dumps(config))
    finished = [tiny(script=RUN)] if ranks == 1 else tiny.ranks(ranks, *LAYOUTS[layout], script=RUN)
    assert [each.code for each in finished] == [0] * ranks, "\n".join(each.out[-2000:] for each in finished)
    return [json.loads((tiny.folder / "out" / f"result-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, Any]:
    """Filled by the first test that needs it: the fixture `tiny` is a single test's."""
    return {}


@pytest.fixture
def one(tiny: Any, of_one_process: dict[str, Any]) -> dict[str, Any]:
    if not of_one_process:
        of_one_process.update(run(tiny, 1)[0])
    return of_one_process


def assert_same_metrics(found: dict[str, float], wanted: dict[str, float], where: str) -> None:
    assert found.keys() == wanted.keys(), where
    for name, value in wanted.items():
        expected = pytest.approx(value, rel=1e-6, abs=1e-12, nan_ok=True) if name in ROUNDED else value
        assert found[name] == expected or (math.isnan(value) and math.isnan(found[name])), f"{where}: {name}"


def assert_all_as_one_row_at_a_time(found: dict[str, Any], one: dict[str, Any]) -> None:
    for kind in found.keys() - {"loop"}:
        assert found[kind].keys() == {str(examples) for examples in EXAMPLES}
        for examples, cuts in found[kind].items():
            assert len(cuts) >= 2
            for cut, metrics in cuts.items():
                assert_same_metrics(metrics, one[kind][examples]["1, map"], f"{kind}, {examples} examples, {cut}")


@pytest.mark.parametrize("examples", EXAMPLES)
def test_one_row_at_a_time_finds_what_a_plain_loop_finds(one: dict[str, Any], examples: int) -> None:
    """Losses to 1e-6; everything that is counted by scikit-learn, or by hand, to 1e-12.

    Fails when: the rows' weights are left out of the loss; the label of a token counts at its own position.
    """
    from sklearn import metrics as reference

    rows = one["loop"]["tokens"][:examples]
    nats, correct, tokens = (sum(row[name] for row in rows) for name in ("loss", "correct", "tokens"))
    found = one["language model"][str(examples)]["1, map"]
    assert found["loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert found["token_accuracy"] == correct / tokens
    named = (sum(row["length"] for row in rows) - tokens) * math.log2(260)
    assert found["bits_per_byte"] == pytest.approx((nats / math.log(2) + named) / 1234, rel=1e-6)
    weighed = sum((i + 1) * row["loss"] for i, row in enumerate(rows))
    assert one["rows of a user's own"][str(examples)]["1, map"]["loss"] == pytest.approx(weighed, rel=1e-6)

    rows = one["loop"]["classes"][:examples]
    weight = sum(row["weight"] for row in rows)
    predictions, references = ([row[name] for row in rows] for name in ("prediction", "reference"))
    wanted = {
        "accuracy": reference.accuracy_score(references, predictions),
        "f1": reference.f1_score(references, predictions, average="macro", zero_division=0),
        "f1_weighted": reference.f1_score(references, predictions, average="weighted", zero_division=0),
        "matthews_correlation": reference.matthews_corrcoef(references, predictions) if examples > 1 else 0.0,
    }
    for kind in ("classes", "gathered classes"):
        found = one[kind][str(examples)]["1, map"]
        assert found["loss"] == pytest.approx(sum(row["weight"] * row["loss"] for row in rows) / weight, rel=1e-6)
        shared = wanted.keys() & found.keys()
        assert shared >= {"f1"}
        assert {name: found[name] for name in shared} == pytest.approx({name: wanted[name] for name in shared}, abs=1e-12)
    looked = sum((i + 1) ** 2 * (1 + p + 10 * r) for i, (p, r) in enumerate(zip(predictions, references, strict=True)))
    assert found["looked"] == looked
    module = one["a module of evaluate"][str(examples)]["1, map"]
    assert module["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-12)
    assert module["matthews_correlation"] == pytest.approx(wanted["matthews_correlation"], abs=1e-12, nan_ok=True)


def test_the_rows_tell_mistakes_apart(one: dict[str, Any]) -> None:
    """Right and wrong predictions, several classes, rows of different losses: else the other tests would see nothing.

    Fails when: a model predicts one class, or no token right.
    """
    classes, tokens = one["loop"]["classes"], one["loop"]["tokens"]
    assert {row["reference"] for row in classes} == {0, 1, 2}
    assert len({row["prediction"] for row in classes}) > 1
    assert 0 < sum(row["prediction"] == row["reference"] for row in classes) < len(classes)
    assert 0 < sum(row["correct"] for row in tokens) < sum(row["tokens"] for row in tokens)
    assert len({round(row["loss"] / row["tokens"], 2) for row in tokens}) == len(tokens)


def test_one_process_finds_the_same_for_any_batch_size_and_source(one: dict[str, Any]) -> None:
    """Map-style and streamed splits, padded and packed rows.

    Fails when: the last batch counts as much as the others; padding counts; gathered rows keep the loader's order.
    """
    assert_all_as_one_row_at_a_time(one, one)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("ddp", 3), ("zero3", 2), ("fsdp2", 2), ("fsdp2", 3)])
def test_ranks_find_what_one_process_finds_a_row_at_a_time(tiny: Any, one: dict[str, Any], layout: str, ranks: int) -> None:
    """Every kind of metric, on every rank alike; with 1 example, all ranks but one have only a padding micro-batch.

    Fails when: a padding micro-batch counts; the ranks' means are averaged; gathered rows are in the order of the ranks; the number of
    forward passes differs between ranks (sharded engines wait for ever); only rank 0 gets the metrics.
    """
    found = run(tiny, ranks, layout)
    assert found[0].keys() - {"loop", "a module of evaluate"} == set(KINDS)
    assert_all_as_one_row_at_a_time(found[0], one)
    for other in found[1:]:
        assert json.dumps(other) == json.dumps(found[0])  # as text, since a metric may be "not a number"
