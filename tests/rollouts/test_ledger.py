"""The ledger: what is there is not sampled again, what a kill cut is, and what is damaged counts as not there."""

import datetime
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import toolkit as tk
from tests.rollouts.rollouts_of import rollouts_of
from toolkit.data.loading.batch import Batch
from toolkit.generation.distribution import SamplingSettings
from toolkit.rollouts import ledger, sampling

SETTINGS = SamplingSettings(max_new_tokens=4, eos_token_ids=(0,))
ROWS = [{"prompt": f"{number} is", "answer": str(number)} for number in range(3)]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def groups() -> list[list[Any]]:
    flat = rollouts_of([(row, ["a", "bb"]) for row in ROWS])
    return [flat[start : start + 2] for start in (0, 2, 4)]


def open_(accelerator: Accelerator, model: nn.Module, folder: Path, **more: Any) -> ledger.Phase:
    return tk.open_phase(accelerator, model, folder, 1, SETTINGS, **more)


def test_a_step_comes_back_as_it_was_and_its_parts_are_gone(accelerator: Accelerator, model: nn.Module, tmp_path: Path) -> None:
    """Rewards that are missing or not a number too. Fails when: `_group` gives the reward null, or the parts stay."""
    phase = open_(accelerator, model, tmp_path)
    assert phase.known == {}
    for group in groups():
        phase.append(group, 0)
    assert [path.suffix for path in (tmp_path / "rollouts").iterdir()] == [".part"]
    rollouts = [rollout for group in groups() for rollout in group]
    rollouts[0].rewards, rollouts[0].reward = {"one": None}, float("nan")
    rollouts[1].rewards, rollouts[1].reward = {"one": 0.1}, 0.1
    rollouts[2].kept = [[1, 2, 3]]
    tk.save_rollouts(accelerator, phase, rollouts)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-000001.jsonl"]
    found = ledger.rollouts_of(tmp_path, 1)
    assert str([asdict(each) for each in found]) == str([asdict(each) for each in rollouts])
    again = open_(accelerator, model, tmp_path)
    assert {key: len(group) for key, group in again.known.items()} == {(0, 0): 2, (0, 1): 2, (0, 2): 2}


def test_what_a_kill_left_is_known_and_what_it_cut_is_not(accelerator: Accelerator, model: nn.Module, tmp_path: Path) -> None:
    """Parts of other ranks than there are now; the part of this one goes on behind its last whole line.

    Fails when: `_opened_part` appends to a line that was cut, or only the part of this rank is read.
    """
    phase = open_(accelerator, model, tmp_path)
    phase.append(groups()[0], 0)
    phase.append(groups()[1], 0)
    phase.close()
    phase.append(groups()[2], 3)
    phase.close()
    part = tmp_path / "rollouts/step-000001.rank-0.part"
    os.truncate(part, part.stat().st_size - 7)
    resumed = open_(accelerator, model, tmp_path)
    assert sorted(resumed.known) == [(0, 0), (0, 2)]
    resumed.append(groups()[1], 0)
    resumed.close()
    assert sorted(open_(accelerator, model, tmp_path).known) == [(0, 0), (0, 1), (0, 2)]
    assert all(json.loads(line) for line in part.read_text().splitlines())


def test_the_parts_of_another_step_stay_where_they_are(accelerator: Accelerator, model: nn.Module, tmp_path: Path) -> None:
    """A run that goes back to an earlier step comes to it again. Fails when: opening or saving a step takes those of all steps."""
    later = tk.open_phase(accelerator, model, tmp_path, 2, SETTINGS)
    later.append(groups()[0], 0)
    later.close()
    phase = open_(accelerator, model, tmp_path)
    assert phase.known == {}
    tk.save_rollouts(accelerator, phase, groups()[1])
    assert sorted(tk.open_phase(accelerator, model, tmp_path, 2, SETTINGS).known) == [(0, 0)]


def test_columns_that_json_has_no_word_for_are_kept_as_text(accelerator: Accelerator, model: nn.Module, tmp_path: Path) -> None:
    """Fails when: a row with a date ends the run, or its line counts as damaged."""
    phase, group = open_(accelerator, model, tmp_path), groups()[0]
    for rollout in group:
        rollout.row = {"when": datetime.date(2020, 1, 2), "score": float("inf"), "text": "ü"}
    tk.save_rollouts(accelerator, phase, group)
    assert ledger.rollouts_of(tmp_path, 1)[0].row == {"when": "2020-01-02", "score": None, "text": "ü"}


def test_a_changed_digit_is_noticed(accelerator: Accelerator, model: nn.Module, tmp_path: Path) -> None:
    """Fails when: `intact_records` does not compare the digest."""
    phase = open_(accelerator, model, tmp_path)
    tk.save_rollouts(accelerator, phase, [rollout for group in groups() for rollout in group])
    path = tmp_path / "rollouts/step-000001.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace("-1.0", "-1.5", 1)
    path.write_text("\n".join(lines))
    assert sorted(open_(accelerator, model, tmp_path).known) == [(0, 0), (0, 2)]


@pytest.mark.parametrize("other", ["weights", "seed", "temperature"])
def test_rollouts_of_another_policy_or_way_to_sample_are_not_taken(
    accelerator: Accelerator, model: nn.Module, tmp_path: Path, other: str
) -> None:
    """Fails when: the part of the header that this changes is not compared, or the parts of the other one stay to be mixed in."""
    phase = open_(accelerator, model, tmp_path)
    phase.append(groups()[0], 0)
    phase.close()
    settings, seed = SETTINGS, 0
    if other == "weights":
        with torch.no_grad():
            model.weight[3, 3] += 1e-3
    elif other == "seed":
        seed = 1
    else:
        settings = SamplingSettings(max_new_tokens=4, eos_token_ids=(0,), temperature=0.5)
    found = tk.open_phase(accelerator, model, tmp_path, 1, settings, seed=seed)
    assert found.known == {}
    assert list((tmp_path / "rollouts").iterdir()) == []
    phase = tk.open_phase(accelerator, model, tmp_path / "own", 1, settings, seed=seed)
    tk.save_rollouts(accelerator, phase, groups()[0])
    named = {"weights": "another policy", "seed": "another seed", "temperature": r"\(temperature 0\.5, here 0\.7"}[other]
    with pytest.raises(tk.Refusal, match=f"--rollouts-from .*{named}"):
        tk.open_phase(
            accelerator, nn.Linear(8, 8) if other == "weights" else model, tmp_path, 1,
            SamplingSettings(max_new_tokens=4, eos_token_ids=(0,), temperature=0.7) if other == "temperature" else settings,
            seed=seed + (other == "seed"), source=tmp_path / "own",
        )  # fmt: skip


def test_only_the_newest_steps_are_kept_where_that_is_asked(accelerator: Accelerator, model: nn.Module, tmp_path: Path) -> None:
    """Fails when: `limit` is not passed on, or counts the newest step twice."""
    for step in range(1, 6):
        phase = tk.open_phase(accelerator, model, tmp_path, step, SETTINGS)
        tk.save_rollouts(accelerator, phase, groups()[0], limit=4 if step < 5 else 2)
    assert ledger.steps_of(tmp_path) == [4, 5]


def test_a_disk_that_takes_nothing_costs_a_warning(
    accelerator: Accelerator, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when: an OSError of the ledger ends the run."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger, "write_atomically", full)
    phase = open_(accelerator, model, tmp_path)
    for group in groups():
        phase.append(group, 0)
    tk.save_rollouts(accelerator, phase, groups()[0])
    assert len(re.findall(r"WARNING: .*\bstep 1 .*No space left", capsys.readouterr().err)) == 2


def test_a_damaged_line_is_named_and_refused_as_a_source(
    accelerator: Accelerator, model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when: lines whose sum is wrong are left out without a word."""
    tk.save_rollouts(accelerator, open_(accelerator, model, tmp_path), [*groups()[0], *groups()[1]])
    path = tmp_path / "rollouts/step-000001.jsonl"
    whole = path.read_text()
    for damaged in (whole[:-30], whole.replace('"bb"', '"bc"', 1)):
        path.write_text(damaged)
        line = 3 if damaged == whole[:-30] else 2
        assert len(ledger.rollouts_of(tmp_path, 1)) == 2
        assert f"step-000001.jsonl:{line}: is cut or was changed" in capsys.readouterr().err
        with pytest.raises(tk.Refusal, match=f"step-000001.jsonl:{line} is cut or was changed"):
            open_(accelerator, model, tmp_path / "b", source=tmp_path)
    path.write_text(whole)
    assert len(ledger.rollouts_of(tmp_path, 1)) == 4
    assert not capsys.readouterr().err


def test_a_source_without_rollouts_or_of_other_prompts_is_refused(
    accelerator: Accelerator, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its last step the run samples on. Fails when: what is missing there is sampled without a word."""
    with pytest.raises(tk.Refusal, match="no rollouts are there"):
        open_(accelerator, model, tmp_path, source=tmp_path)
    phase = open_(accelerator, model, tmp_path / "a")
    tk.save_rollouts(accelerator, phase, [*groups()[0], *groups()[1]])
    taken = open_(accelerator, model, tmp_path / "b", source=tmp_path / "a")
    batch = Batch(
        [{"prompt_ids": [[1, 2], [1, 2]], "rows": [ROWS[0], ROWS[2]]}], {}, [True], indices=[[0, 2]], epochs=[[0, 0]],
    )  # fmt: skip
    monkeypatch.setattr(sampling, "sample_on_rank", lambda accelerator, model, prompts, *_, **__: prompts and pytest.fail("sampled"))
    with pytest.raises(tk.Refusal, match="prompt number 2"):
        tk.sample_rollouts(accelerator, model, SimpleNamespace(), batch, SETTINGS, num_generations=2, phase=taken)
    batch.indices = [[0, 1]]
    rollouts = tk.sample_rollouts(accelerator, model, SimpleNamespace(), batch, SETTINGS, num_generations=2, phase=taken)
    assert [(each.prompt, each.index, each.completion, each.row["answer"]) for each in rollouts] == [
        (0, 0, "a", "0"), (0, 1, "bb", "0"), (1, 0, "a", "2"), (1, 1, "bb", "2")
    ]  # fmt: skip
    later = tk.open_phase(accelerator, model, tmp_path / "b", 2, SETTINGS, source=tmp_path / "a")
    assert later.known == {}
    assert later.source is None


def test_a_copy_of_a_file_in_the_ledger_is_no_step(tmp_path: Path) -> None:
    """Fails when: `steps_of` reads a number out of every name."""
    (tmp_path / "rollouts").mkdir()
    for name in ("step-000003.jsonl", "step-000003 (copy).jsonl", "step-000004.old.jsonl", "step-.jsonl"):
        (tmp_path / "rollouts" / name).touch()
    assert ledger.steps_of(tmp_path) == [3]


@pytest.mark.parametrize("text", ["", '{"a": 1}\n'], ids=["empty", "no first line"])
def test_a_step_of_which_nothing_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Fails when: `rollouts_of` warns of lines that are damaged alone."""
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step-000001.jsonl").write_text(text)
    assert ledger.rollouts_of(tmp_path, 1) == []
    assert "step-000001.jsonl: its first line" in capsys.readouterr().err


def test_a_step_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Fails when: an OSError goes through `read_step`."""
    (tmp_path / "rollouts/step-000001.jsonl").mkdir(parents=True)
    with pytest.raises(tk.Refusal, match=r"step-000001\.jsonl: can't be read"):
        ledger.rollouts_of(tmp_path, 1)
