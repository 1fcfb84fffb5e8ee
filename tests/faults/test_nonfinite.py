"""Numbers that are not finite: no parameter takes them, and the rows they came from are named."""

import json

import pytest

from toolkit import checkpoint as ckpt

BERT = ["--model", "tiny-bert", "--dropout", "0.1"]


def incidents(run) -> list[dict]:
    path = run.folder / "incidents/nonfinite.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("kind", ["loss", "gradient", "row"])
def test_parameters_stay_finite_and_the_rows_are_named(tiny, tally, chance, count, kind: str) -> None:
    """Fails when: the guard looks at the loss alone, or at the gradient after clipping; or an incident names no rows."""
    line = tally("F16", {"loss": "NaN loss in a step", "gradient": "inf in one gradient", "row": "inf from one row"}[kind])
    for _ in range(count(2, 20)):
        tiny.fresh()
        where = chance.randrange(30) if kind == "row" else chance.randrange(1, 20)
        run = tiny(*BERT, ill={"nonfinite": kind, "at": [where]})
        with line.trial(f"{kind} {where}"):
            assert run.code == 0, run.out
            assert run.result["finite"]
            found = incidents(run)
            assert run.result["applied"] == 20 - len(found)
            assert [event["loss"] for event in run.metrics if event.get("loss") == 0.0] == []
            for incident in found:
                origins = [origin for row in incident["rows"] for origin in row["origin"]]
                expected = [f"rows.jsonl:{example + 1}" for example in run.result["order"][incident["step"] - 1]]
                assert origins == expected
                if kind == "row":
                    assert f"rows.jsonl:{where + 1}" in origins
                else:
                    assert incident["step"] == where
            consumed = sum(where in step for step in run.result["order"])
            assert len(found) == (consumed if kind == "row" else 1)
    line.check()


def test_three_in_a_row_end_the_run_with_the_last_good_checkpoint_kept(tiny, tally) -> None:
    """Fails when: the run continues, or saves what is not finite."""
    line = tally("F16", "NaN loss in three steps in a row: the run ends, the last good checkpoint is whole and finite")
    tiny.fresh()
    run = tiny(*BERT, ill={"nonfinite": "loss", "at": [9, 10, 11]})
    with line.trial():
        assert run.code == 1
        assert "3 step(s) in a row" in run.out
        newest = ckpt.latest_checkpoint(run.folder / "checkpoints")
        assert newest.name == "step-8"
        assert ckpt.nonfinite_parameter(ckpt.load_checkpoint(newest)) is None
    line.check()


def test_an_incident_that_cannot_be_written_down_does_not_end_the_run(tiny, tally) -> None:
    """A full disk and a NaN at once: `incidents` is a file here. Fails when: the guard lets an OSError through."""
    line = tally("F16", "NaN loss in a step, its record can't be written: the run goes on")
    tiny.fresh().mkdir()
    (tiny.folder / "out/incidents").write_text("in the way")
    run = tiny(*BERT, ill={"nonfinite": "loss", "at": [5]})
    with line.trial():
        assert run.code == 0, run.out
        assert run.result["applied"] == 19
        assert "rows.jsonl" in run.out
    line.check()


@pytest.mark.slow
def test_a_resume_counts_what_was_skipped_before(tiny, tally, resumed_from) -> None:
    """Killed after two bad steps in a row; the third ends it. Fails when: the count is not in the checkpoint."""
    line = tally("F16", "NaN in steps 3 to 5, killed after the save of step 4, resumed: ends at step 5")
    tiny.fresh()
    ill = {"nonfinite": "loss", "at": [3, 4, 5]}
    tiny(*BERT, ill=ill | {"at": [3, 4]}, plan={"kill_after_save": 1})
    run = tiny(*BERT, "--resume", ill=ill)
    with line.trial():
        assert resumed_from(run) == 4
        assert run.code == 1, run.out
        assert "the last one step 5" in run.out
    line.check()
