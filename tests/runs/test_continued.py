"""What a run continued with otherwise than it began is in its card, whatever it is continued with afterwards."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.cli.replay_checks import read_run
from toolkit.config import Refusal


def card_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_an_allowed_change_is_told_ever_after(tiny: Any) -> None:
    """Continued once more with nothing left to train, and then for longer: with each change, at its step.

    Fails when: a checkpoint does not hold the changes before it, or the card is that of the last command alone; a resume that trains
    nothing rewrites config.yaml."""
    assert tiny("--max-steps", "4").code == 0
    longer = ["--max-steps", "6", "--resume"]
    assert tiny(*longer, "--allow-change", "max_steps").code == 0
    folder = tiny.folder / "out"
    (first,) = card_of(folder)["continued"]
    assert re.match(r"step 4: max_steps .*\b4 .*\b6: .*--allow-change$", first)
    settings = (folder / "config.yaml").read_text()
    again = tiny(*longer, "--logging-steps", "5")
    assert again.code == 0
    assert "step 6 of 6" in again.out
    assert (folder / "config.yaml").read_text() == settings
    card = card_of(folder)
    assert (card["continued"], card["settings"]["logging_steps"], card["end"]["status"]) == ([first], 1, "finished")
    with pytest.raises(Refusal, match=re.escape(f"({first}")):
        read_run(folder)
    assert tiny("--max-steps", "8", "--resume", "--learning-rate", "0.5", "--allow-change", "max_steps,learning_rate").code == 0
    card = card_of(folder)
    assert [line.split(" was ")[0] for line in card["continued"]] == ["step 4: max_steps", "step 6: learning_rate", "step 6: max_steps"]
    assert yaml.safe_load((folder / "config.yaml").read_text())["max_steps"] == 8


def test_a_run_that_goes_on_as_it_began_can_be_replayed(tiny: Any) -> None:
    """With other logging, which changes no weight, and a change allowed that is none; from a checkpoint of its own that is named.

    Fails when: any resume counts as a change, or the name of a setting alone."""
    assert tiny("--max-steps", "8", "--save-total-limit", "none").code == 0
    named = ["--resume-from", "out/checkpoints/step-4"]
    done = tiny("--max-steps", "8", "--logging-steps", "2", *named, "--allow-change", "learning_rate")
    assert done.code == 0, done.out
    card, settings = read_run(tiny.folder / "out")
    assert (card["continued"], settings["logging_steps"]) == ([], 2)


def test_a_run_that_began_as_another_one_says_so(tiny: Any) -> None:
    """Also with nothing left to train in the new directory. Fails when: only settings are compared, or it is forgotten later."""
    assert tiny("--max-steps", "4", output_dir="one").code == 0
    assert tiny("--max-steps", "4", "--resume-from", "one/checkpoints/step-4", output_dir="two").code == 0
    (came,) = card_of(tiny.folder / "two")["continued"]
    assert re.match("step 4: .*another run, one/checkpoints/step-4$", came)
    more = ["--max-steps", "8", "--allow-change", "max_steps"]
    assert tiny(*more, "--resume-from", "one/checkpoints/step-4", output_dir="three").code == 0
    assert tiny("--max-steps", "8", "--resume", output_dir="three").code == 0
    assert card_of(tiny.folder / "three")["continued"][0] == came


def test_other_ways_to_round_are_told_too(tiny: Any) -> None:
    """What needs no --allow-change. Fails when: only what was allowed is kept."""
    assert tiny("--max-steps", "4").code == 0
    card = card_of(tiny.folder / "out")
    assert card["continued"] == []
    flags = ["--per-device-train-batch-size", "1", "--gradient-accumulation-steps", "2", "--max-steps", "6", "--allow-change", "max_steps"]
    assert tiny(*flags, "--resume").code == 0
    assert any(re.search(r"per_device_train_batch_size .*\b2 .*\b1: ", line) for line in card_of(tiny.folder / "out")["continued"])
