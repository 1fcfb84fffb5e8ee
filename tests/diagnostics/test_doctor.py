"""toolkit doctor: planted mistakes are found at their line, recipes without one are accused of nothing."""

import importlib.util
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

import toolkit as tk
from toolkit.cli.main import app
from toolkit.command_line.recipe import config_class_of_file
from toolkit.config import Refusal
from toolkit.diagnostics.checks_of_data import check_padding, check_tokens
from toolkit.diagnostics.checks_of_ends import check_ends, check_stops
from toolkit.diagnostics.checks_of_gradients import check_alone, check_split
from toolkit.diagnostics.checks_of_labels import check_masks
from toolkit.diagnostics.checks_of_runs import check_evaluation, check_overfit
from toolkit.diagnostics.direction import check_direction, direction_of
from toolkit.diagnostics.findings import CHECKS
from toolkit.diagnostics.records import MadeBatch, Record, Update
from toolkit.diagnostics.small import with_small_model, with_small_teacher

_SPEC = importlib.util.spec_from_file_location("planted", Path(__file__).with_name("planted.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
planted = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(planted)
CLEAN = sorted(path.stem for path in planted.RECIPES.glob("*.py"))


def doctor(*words: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["doctor", *words, "--json"], prog_name="toolkit")
    assert done.exit_code in (0, 1), done.output + repr(done.exception)
    report = json.loads(done.stdout)
    assert [each for each in report["checks"] if "check itself failed" in each["note"]] == []
    return done.exit_code, report


def write_classifier(folder: Path) -> str:
    """A model directory of random weights with the classes and the tokens of accelerated.py."""
    import toolkit as tk

    config = tk.ModelConfig(model="tiny-bert")
    tokenizer = tk.pad_apart_from_end(tk.load_tokenizer(config))
    labels = tk.label_settings(tk.load_splits("stdlib:classify"), tk.ClassificationConfig())
    tk.load_model("AutoModelForSequenceClassification", config, tokenizer, **labels).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", planted.MISTAKES)
def test_a_planted_mistake_is_found_at_its_line(name: str, tmp_path: Path) -> None:
    """Its check alone is asked for. Fails when: check_split compares a gradient with itself, or watch.place() gives no line."""
    _, _, flags, check, line = planted.MISTAKES[name]
    copy = planted.copy_with(planted.MISTAKES[name], tmp_path)
    code, report = doctor(str(copy), *flags, "--only", check)
    findings = report["findings"]
    assert (code, {finding["check"] for finding in findings}) == (1, {check}), report
    assert [each["check"] for each in report["checks"]] == ["runs", check]
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == [copy.name]
    if line is not None:
        lines = copy.read_text().splitlines()
        named = [lines[int(finding["where"].rpartition(":")[2]) - 1] for finding in findings if finding["where"]]
        assert any(line in each for each in named), named


# Own losses and loops that are right: recipe, a line of it and what is there instead, check.
_OF_LISTS = "    model, optimizer = accelerator.prepare("
_RIGHT: dict[str, tuple[str, str, str, str]] = {
    "squared errors of scaled labels": (
        "reranker", _OF_LISTS, '''    def loss_fn(model, micro_batch, totals):
        scores = model(**{name: micro_batch[name] for name in ("input_ids", "attention_mask")}).logits.squeeze(-1)
        return (scores - 4 * micro_batch["labels"]).square().sum() / totals["documents"], {}

    model, optimizer = accelerator.prepare(''', "direction",
    ),
    "differences of scores alone": (
        "multiple_choice", _OF_LISTS, '''    def loss_fn(model, micro_batch, totals):
        from toolkit.losses.ranking import one_choice_a_row, score_lists
        scores, wanted, choices = score_lists(one_choice_a_row(model), micro_batch)
        right = (scores * wanted).sum(-1, keepdim=True)
        return ((1 - right + scores).relu() * choices * (wanted == 0)).sum() / totals["examples"], {}

    model, optimizer = accelerator.prepare(''', "trained",
    ),
    "a cosine by hand": (
        "sft", "            rates = schedule(run.progress, run.objective)\n", '''            import math
            rates = [config.learning_rate * (1 + math.cos(math.pi * run.progress)) / 2 for _ in optimizer.param_groups]
''', "rates",
    ),
    "weights that are the reference's probability of chosen answers": (
        "dpo", planted._PAIRS, '''        import torch
        weights = (before.chosen / before.chosen_tokens).exp()
        losses = -weights * torch.nn.functional.logsigmoid(config.beta * (policy.chosen - policy.rejected))
        return losses.sum() / totals["pairs"], {}
''', "direction",
    ),
    "two losses, of which one has a reference": (
        "dpo", planted._PAIRS, '''        from torch.nn.functional import logsigmoid
        losses = -logsigmoid(policy.chosen - before.chosen) - logsigmoid(-policy.rejected / policy.rejected_tokens)
        return losses.sum() / totals["pairs"], {}
''', "direction",
    ),
    "a KL that is a squared distance": (
        "ppo", "        return policy_loss +", '''        apart = (logps - completions["reference_logps"]) * completions["mask"]
        policy_loss = policy_loss + 0.1 * apart.square().sum() / totals["completion_tokens"]
        return policy_loss +''', "direction",
    ),
    "the mean of all rewards as baseline": (
        "grpo", planted._UPDATES, "            advantages = scores - scores.mean()\n" + planted._UPDATES, "direction",
    ),
    "values that are not held to the old ones": (
        "ppo", 'completions["old_values"], completions["returns"], completions["mask"], totals,\n            cliprange_value=config.cliprange_value,',
        '0 * values.detach(), completions["returns"], completions["mask"], totals, cliprange_value=None,', "direction",
    ),
    "lists of one length alone": (
        "reranker", _OF_LISTS, '''    def loss_fn(model, micro_batch, totals):
        inputs = {name: micro_batch[name] for name in ("input_ids", "attention_mask")}
        scores, labels = (each.reshape(-1, 8) for each in (model(**inputs).logits, micro_batch["labels"]))
        return -(labels * scores.log_softmax(-1)).sum() / totals["examples"], {}

    model, optimizer = accelerator.prepare(''', "alone",
    ),
    "embeddings of length 1": (
        "embedding", "    embed = partial(tk.embed_texts, pooling=style.pooling)\n", '''
    def embed(model, texts):
        import torch
        return torch.nn.functional.normalize(tk.embed_texts(model, texts, pooling=style.pooling), dim=-1)

''', "saved",
    ),
    "a first layer that is frozen": (
        "sft", "    collate = tk.collate_packed", "    model.model.embed_tokens.requires_grad_(False)\n    model.model.layers[0].requires_grad_(False)\n    collate = tk.collate_packed",
        "overfit",
    ),
    "labels that are shifted once, of documents that see each other": (
        "sft", planted._SFT_LOSS, planted.own_loss(left_out=', "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"'), "shift",
    ),
    "labels that the loss takes out of its micro-batch": (
        "accelerated", planted._CLASS_LOSS, planted._CLASS_LOSS + '''    given = loss_fn

    def loss_fn(model, micro_batch, totals):
        labels = micro_batch.pop("labels")
        return given(model, {**micro_batch, "labels": labels}, totals)

''', "split",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _RIGHT)
def test_what_is_right_in_another_way_is_not_accused(name: str, tmp_path: Path) -> None:
    """Fails when, by row: labels are counted from 1/2 and not from the mean of their list; a bias of 0 gradient counts as unreached; rates
    are compared with a schedule that the recipe never asks; a reference is to be of both answers, in any loss; also where each has
    a loss of its own; a KL is to be less when the two are apart; advantages are to add up to 0 by prompt; old values are read without a
    range to clip to; lists must be of any lengths; embeddings are compared with their lengths; a loss must fall by 30%; the gradient of a document is
    looked at that others see; the loss function gets the very micro-batch that is recorded."""
    recipe, old, new, check = _RIGHT[name]
    copy = planted.copy_with((recipe, [(old, new)], [], check, None), tmp_path)
    code, report = doctor(str(copy), "--only", check)
    assert (code, report["findings"]) == (0, [])
    assert report["checks"][-1]["state"] == "ok"


def test_a_head_that_was_trained_before_may_be_frozen(tmp_path: Path) -> None:
    """It is in the files of the model. Fails when: any head that is frozen counts as a new one."""
    frozen = planted._CLASS_LOSS + "    model.classifier.requires_grad_(False)\n"
    path = planted.copy_with(("accelerated", [(planted._CLASS_LOSS, frozen)], [], "trained", None), tmp_path)
    code, report = doctor(str(path), "--model", write_classifier(tmp_path / "model"), "--only", "trained")
    assert (code, report["findings"]) == (0, [])


def test_weights_that_make_up_for_unequal_numbers_are_right(tmp_path: Path) -> None:
    """One answer of four is desirable and counts for more than the three others. Fails when: what changes all answers alike counts in a direction."""
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n + 1}.", "label": n % 4 == 0} for n in range(80)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, report = doctor("kto", "--dataset", str(tmp_path / "rows.jsonl"), "--desirable-weight", "20", "--only", "direction")
    assert (code, report["findings"]) == (0, [])
    assert report["checks"][-1]["state"] == "ok"


@pytest.mark.parametrize(
    ("losses", "unchanged", "accused", "said"),
    [
        ([2.077] * 5 + [1.994] * 55, 0.0, False, ""),  # --ranking-loss listnet: the entropy of its targets is left
        ([1.39] * 30 + [1.38] * 30, 0.0, True, "sign"),
        ([0.6931472] * 59 + [0.6931471], 0.0, True, "reference"),
        ([0.6931472] * 60, 1.0, True, "sign"),
    ],
)
def test_a_loss_that_comes_down_to_its_own_least_is_learned(losses: list[float], unchanged: float, accused: bool, said: str) -> None:
    """Fails when: a loss must come near 0; or a constant loss is put down to a reference where no weight has changed."""
    update = Update([1e-3], {"w": torch.ones(2)}, {}, None, 1, "", unchanged=unchanged)
    findings = check_overfit(Record(events=[{"loss": loss} for loss in losses], updates=[update])).findings
    assert bool(findings) is accused
    assert all(said in finding.change for finding in findings)


def test_training_in_evaluation_mode_from_the_first_step_on_is_not_put_down_to_an_evaluation(tmp_path: Path) -> None:
    """Fails when: what is to change is the same as where an evaluation left the mode on."""
    mistake = ("accelerated", [("        for batch in run:\n", "        model.eval()\n        for batch in run:\n")], [], "modes", None)
    code, report = doctor(str(planted.copy_with(mistake, tmp_path)), "--only", "modes", "--eval-strategy", "no")
    assert (code, [each["check"] for each in report["findings"]]) == (1, ["modes"])
    assert "evaluation" not in report["findings"][0]["change"]


_IDS = list(range(3, 12))
_PAIR = {"prompt_tokens": 4, "chosen_tokens": 3, "rejected_tokens": 2, "pair": 0}
_WINDOW = {"start_positions": 1, "end_positions": 2, "window": 0, "context_start": 1, "char_starts": [0], "char_ends": [1]}
_TEXTS = {"text_tokens": [4, 5], "text_keys": [0, 1]}


@pytest.mark.parametrize(
    ("collate", "document"),
    [
        (tk.collate_padded, {"labels": 1}), (partial(tk.collate_padded, layout="packed"), {"labels": 1}), (tk.collate_packed, {}),
        (tk.collate_lists, {"document_tokens": [4, 5], "labels": [0.0, 1.0]}),
        (tk.collate_text_groups, _TEXTS), (partial(tk.collate_text_groups, layout="packed"), _TEXTS), (tk.collate_windows, _WINDOW),
        *((partial(tk.collate_pairs, layout=layout), _PAIR) for layout in ("shared", "packed", "padded")),
        (tk.collate_answers, {"prompt_tokens": 4, "desirable": True, "answer": 0}),
        (partial(tk.collate_seq2seq, pad_token_id=0, decoder_start_token_id=0), {"source_tokens": 4}),
    ],
)  # fmt: skip
def test_a_token_that_is_lost_is_counted_in_every_layout(collate: Any, document: dict[str, Any]) -> None:
    """Of the shorter of two rows, with the id of padding. Fails when: padding or a prompt that is read twice is a mistake, the
    padding makes up for a lost token of its id, or targets are not looked for in the labels."""
    longer = [] if "document_tokens" in document else [12]
    rows = [{"input_ids": np.array(ids), **document} for ids in ([*_IDS, *longer], [*_IDS[:-1], 0])]
    total = 18 + len(longer)
    for last, state, seen in ((0, "ok", total), (30, "finding", total - 1)):
        tensors = collate([rows[0], {**rows[1], "input_ids": np.array([*_IDS[:-1], last])}])
        outcome = check_tokens(Record(made_batches={0: MadeBatch(tensors, rows, collate, kind="train")}))
        assert (outcome.state, outcome.note) == (state, f"{seen} of {total} tokens of the rows")


def test_a_check_that_looked_at_nothing_does_not_say_ok(tmp_path: Path) -> None:
    """Of rows without padding and with labels of whole examples, at a low rate. Fails when: that is ok for one of them."""
    rows = [{"input_ids": np.array(_IDS), "labels": 1}] * 2
    made = MadeBatch(tk.collate_padded(rows), rows, tk.collate_padded, kind="train")
    update = Update([1e-6], {}, {}, None, 1, "")
    record = Record(task="sft", tokenizer=tk.load_tokenizer(tk.ModelConfig()), made_batches={0: made}, updates=[update], events=[{"loss": 1.0}] * 10)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    outcomes = check_padding(record), check_masks(record, tk.ModelConfig()), check_overfit(record), check_stops(record, tmp_path)
    assert [each.state for each in outcomes] == ["skipped"] * 4


@pytest.mark.parametrize(("before", "accused"), [(0, True), (1, False)])
def test_labels_are_in_their_places_where_a_collate_function_puts_a_token_before_each_row(before: int, accused: bool) -> None:
    """Labels a place to the right, with the tokens or without them. Fails when: `are_in_place` is always true, or labels are
    counted alone."""
    documents = [{"input_ids": np.array([5, 6, 7, 8]), "labels": np.array([-100, 1, 1, -100])}]
    ids = torch.tensor([[9] * before + [5, 6, 7, 8, 0][: 5 - before]])
    made = MadeBatch({"input_ids": ids, "labels": torch.tensor([[-100, -100, 1, 1, -100]])}, documents, tk.collate_padded, kind="train")
    record = Record(task="token_classification", made_batches={0: made})
    assert bool(check_masks(record, tk.ModelConfig()).findings) is accused


@pytest.mark.parametrize(("before", "is_learned", "state"), [(0, False, "finding"), (0, True, "ok"), (4, True, "skipped")])
def test_ends_are_learned_behind_padding_on_the_left(before: int, is_learned: bool, state: str) -> None:
    """Fails when: the labels of a row that isn't at its beginning are read there, or none of none is ok."""
    tokenizer = tk.load_tokenizer(tk.ModelConfig())
    end = tokenizer.eos_token_id
    documents = [{"input_ids": np.array([5, 6, 7, end]), "labels": np.array([-100, 6, 7, end])}]
    ids = torch.tensor([[1] * before + [5, 6, 7, end]])
    labels = torch.tensor([[-100] * before + [-100, 6, 7, end if is_learned else -100]])
    made = MadeBatch({"input_ids": ids, "labels": labels}, documents, tk.collate_padded, kind="train")
    record = Record(task="sft", tokenizer=tokenizer, made_batches={0: made})
    assert check_ends(record, tk.ModelConfig()).state == state


@pytest.mark.slow
def test_all_checks_together_find_what_each_finds(tmp_path: Path) -> None:
    """Fails when: a check is shown the run of another one, or some have no run without --only."""
    copy = planted.copy_with(planted.MISTAKES["a mean of means"], tmp_path)
    code, report = doctor(str(copy), "--no-packing")
    assert (code, len(report["checks"])) == (1, len(CHECKS))
    assert {"split", "alone"} <= {finding["check"] for finding in report["findings"]}


@pytest.mark.parametrize(
    ("errors", "state"), [([math.nan], "skipped"), ([math.inf, math.nan], "skipped"), ([math.nan, 0.5, 0.1], "finding"), ([math.nan, 1e-7], "ok")]
)
def test_a_gradient_that_is_not_finite_is_no_mistake_of_padding(errors: list[float], state: str) -> None:
    """That it is not finite is a finding of its own. Fails when: NaN is a distance like others, or hides that of another row."""
    record = Record(alone=[(error, 2, "mine.py:1") for error in errors])
    assert check_alone(record, tk.ModelConfig()).state == state


def test_a_split_whose_gradient_is_not_finite_says_so() -> None:
    """Fails when: it says that there was none."""
    one, other = (
        Record(updates=[Update([], {}, {"w": torch.tensor([number])}, None, 1, "")]) for number in (1.0, math.inf)
    )  # fmt: skip
    outcome = check_split(one, other, tk.ModelConfig())
    assert (outcome.state, outcome.note) == ("skipped", "a gradient was not finite")


def test_a_recipe_without_a_mistake_is_accused_of_nothing() -> None:
    """Fails when: `alone` leaves dropout on, or another check takes rounding for a mistake."""
    code, report = doctor("accelerated")
    assert (code, report["findings"]) == (0, [])
    assert {"split", "alone", "resume", "saved", "evaluation"} <= {c["check"] for c in report["checks"] if c["state"] == "ok"}


def test_what_a_recipe_prints_is_not_in_the_report(tmp_path: Path) -> None:
    """As DeepSpeed's line at its import was. Fails when: JSON and what is printed share standard output."""
    copy = tmp_path / "of_mine.py"
    copy.write_text((planted.RECIPES / "accelerated.py").read_text() + "\nprint('a line of the recipe')\n")
    code, report = doctor(str(copy), "--only", "types")
    assert (code, report["recipe"]) == (0, str(copy))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in CLEAN if name != "accelerated"])
def test_no_recipe_of_the_toolkit_is_accused(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: a check takes what one recipe does on purpose for a mistake."""
    monkeypatch.chdir(tmp_path)  # where `make demo` has left no model to begin with
    code, report = doctor(recipe)
    assert (code, report["findings"]) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("sft", "--no-packing --no-completion-only-loss"), ("sft", "--dtype bfloat16 --learning-rate 0.01"),
        ("dpo", "--loss-type ipo --use-peft"), ("dpo", "--label-smoothing 0.3"), ("dpo", "--loss-type discopop"),
        ("reranker", "--ranking-loss listnet"), ("lora", "--use-dora --model tiny-qwen3"), ("grpo", "--loss-type dr_grpo"),
        ("token_classification", "--weight-decay 0.1 --max-grad-norm 0.1 --optim sgd --learning-rate 0.1"),
    ],
)  # fmt: skip
def test_settings_that_are_unusual_are_not_mistakes(recipe: str, flags: str) -> None:
    """Fails when: a tolerance holds for the defaults alone."""
    code, report = doctor(recipe, *flags.split())
    assert (code, report["findings"]) == (0, [])


@pytest.mark.parametrize(("reward", "accused"), [(8.163e-4, False), (1.224e-3, True)])
def test_a_reward_is_as_exact_as_the_log_probabilities_that_it_is_made_of(reward: float, accused: bool) -> None:
    """The mean of two answers, not of three, is half as large again. Fails when: the reward alone says what rounding may change."""
    split, whole = Record(), Record()
    split.events = [{"step": 2, "eval_logps_desirable": -251.50174, "eval_rewards_desirable": 8.151e-4}]
    whole.events = [{"step": 2, "eval_logps_desirable": -251.50173, "eval_rewards_desirable": reward}]
    weights = {"split": {"weight": torch.ones(2)}, "whole": {"weight": torch.ones(2)}}
    assert bool(check_evaluation(split, whole, weights).findings) is accused


def test_rows_longer_than_those_of_short_runs_are_looked_at(tmp_path: Path) -> None:
    """Prompts of some 300 tokens, in a run that refuses what is too long. Fails when: a refusal by doctor's own length is final."""
    turns = [("user", "one more word " * 100), ("assistant", "Yes.")]
    rows = [{"messages": [{"role": role, "content": f"{n} {text}"} for role, text in turns]} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = f"--dataset {tmp_path / 'rows.jsonl'} --max-length 512 --overlong refuse --hidden-size 32 --num-hidden-layers 1"
    code, report = doctor("sft", *flags.split(), "--only", "masks")
    assert (code, report["findings"]) == (0, [])
    assert report["checks"][-1]["state"] == "ok"


def test_decay_by_hand_that_is_right_is_not_accused(tmp_path: Path) -> None:
    """Of matrices alone, where the optimizer has none. Fails when: matrices that the optimizer doesn't decay do not decay at all,
    or all decay by hand is wrong."""
    optimizer = "    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)\n"
    own = optimizer + "    for group in optimizer.param_groups:\n        group['weight_decay'] = 0.0\n"
    step = "                optimizer.step()\n"
    by_hand = step + "                for p in model.parameters():\n                    if p.dim() > 1 and p.shape[0] > 1:\n"
    by_hand += "                        p.data.mul_(1 - rate * config.weight_decay)\n"
    copy = planted.copy_with(("basic", [(optimizer, own), (step, by_hand)], [], "", None), tmp_path)
    code, report = doctor(str(copy), "--weight-decay", "0.1", "--only", "decay")
    assert (code, report["findings"]) == (0, [])


@pytest.mark.slow
def test_own_code_that_is_right_is_not_accused(tmp_path: Path) -> None:
    """A hand-written loss and collate function that differ from the toolkit's and are exact. Fails when: what is unknown counts as wrong."""
    mistake = (
        "sft",
        [("    loss_fn = partial(tk.causal_lm_loss, label_smoothing_factor=config.label_smoothing_factor, z_loss=config.z_loss)\n", planted.own_loss()),
         ("    collate = tk.collate_packed if config.packing else tk.collate_padded\n", planted.own_collate("pass"))],
        ["--no-packing"], "", None,
    )  # fmt: skip
    code, report = doctor(str(planted.copy_with(mistake, tmp_path)), "--no-packing")
    assert (code, report["findings"]) == (0, [])


def test_a_preference_loss_of_ones_own_is_not_held_against_an_even_guess(tmp_path: Path) -> None:
    """As ORPO's sum of two. Fails when: any loss of pairs is taken for DPO's, or the recipe's own for one of the user's."""
    theirs = "        return tk.preference_loss(policy, before, totals, **loss_values)\n"
    own = "        return -policy.chosen.sum() / totals['chosen_tokens'], {}\n"
    copy = planted.copy_with(("dpo", [(theirs, own)], [], "start", None), tmp_path)
    assert doctor(str(copy), "--only", "start")[0] == 0
    assert "ln 2 answers" in doctor("dpo", "--only", "start")[1]["checks"][-1]["note"]


def test_an_update_without_a_gradient_has_no_direction() -> None:
    """As of an optimizer that is stepped before the first backward. Fails when: it ends the run, whose other checks see nothing then."""
    record = Record(task="preference", tokenizer=tk.load_tokenizer(tk.ModelConfig()), models=[torch.nn.Linear(1, 1)])
    assert direction_of(record, [{}], {}) is None


@pytest.mark.parametrize(("server", "accused"), [(None, True), ("http://localhost:8000", False)])
def test_a_server_that_samples_may_round_in_another_way(server: str | None, accused: bool) -> None:
    """Fails when: its log-probabilities are to be those of the recipe's model."""
    config = config_class_of_file(planted.RECIPES / "grpo.py")(rollout_server=server)
    assert bool(check_direction(Record(off_sampled=[(0.1, "")]), config).findings) is accused


def test_a_recipe_that_fails_is_a_finding_with_its_line(tmp_path: Path) -> None:
    """Fails when: the error of the first run is swallowed."""
    path = planted.copy_with(("accelerated", [("    with tk.open_run(", "    {}['nothing']\n    with tk.open_run(")], [], "", None), tmp_path)
    code, report = doctor(str(path))
    (finding,) = report["findings"]
    assert (code, finding["check"]) == (1, "runs")
    assert "KeyError" in finding["what"]
    assert "nothing" in path.read_text().splitlines()[int(finding["where"].rpartition(":")[2]) - 1]


@pytest.mark.parametrize(
    ("ending", "setting", "run", "accused"),
    [
        ("KeyError('mine')", "per_device_train_batch_size == 1", "split", True),
        ("KeyError('mine')", "lr_scheduler_type == 'constant'", "overfit", True),
        ("tk.Refusal('mine')", "per_device_train_batch_size == 1", "split", False),
        ("importlib.import_module('toolkit.training.anomalies').Diverged('mine')", "lr_scheduler_type == 'constant'", "overfit", False),
    ],
)
def test_a_short_run_that_ends_with_an_error_is_a_finding_with_its_line(
    ending: str, setting: str, run: str, accused: bool, tmp_path: Path
) -> None:
    """What the toolkit refuses or ends itself is none, as doctor's settings may be to blame. Fails when: a check that could
    not look for it says `--` alone, with code 0; or any exception counts."""
    line = f"    if config.{setting}:\n        import importlib\n        raise {ending}\n"
    change = ("    with tk.open_run(", line + "    with tk.open_run(")
    path = planted.copy_with(("accelerated", [change], [], "", None), tmp_path)
    code, report = doctor(str(path), "--only", run)
    states = {check["check"]: (check["state"], "mine" in check["note"]) for check in report["checks"]}
    assert states == {"runs": ("finding" if accused else "ok", False), run: ("skipped", True)}
    assert code == accused
    for finding in report["findings"]:
        assert finding["check"] == "runs"
        assert "KeyError" in finding["what"]
        assert "mine" in path.read_text().splitlines()[int(finding["where"].rpartition(":")[2]) - 1]


def test_a_disk_without_room_is_that_of_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the refusal names --output-dir, which nobody typed."""

    def full(*_: Any) -> None:
        raise Refusal("--output-dir /tmp/doctor-x: 3 MB free")

    monkeypatch.setattr("toolkit.runs.directory.check_disk_space", full)
    done = CliRunner().invoke(app, ["doctor", "accelerated"], prog_name="toolkit")
    assert isinstance(done.exception, Refusal)
    assert "TMPDIR" in str(done.exception)
    assert "--output-dir" not in str(done.exception)


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("import nowhere_at_all\n", [], "nowhere_at_all"),
        ("def main(:\n", [], "line 1"),
        ("x = 1\n", [], "main"),
        ("main = 3\n", [], "main is 3"),
        ("def main(config):\n    pass\n", [], "broken.py:1: main takes one config"),
        ("import toolkit as tk\ndef main(config: tk.OptimConfig, more: int):\n    pass\n", [], "broken.py:2: main takes one config"),
        ("raise SystemExit(7)\n", [], "broken.py:1"),
        (None, ["--learning-rate", "-1"], "--learning-rate"),
        (None, ["--dataset", "nowhere.jsonl"], "nowhere.jsonl"),
        (None, ["--only", "splits"], "splits"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_message(text: str | None, words: list[str], said: str, tmp_path: Path) -> None:
    """Fails when: a recipe that can't be imported, or whose main takes something else, shows a traceback, or ends with 1 or its own code."""
    path = planted.RECIPES / "accelerated.py"
    if text is not None:
        path = tmp_path / "broken.py"
        path.write_text(text)
    done = CliRunner().invoke(app, ["doctor", str(path), *words], prog_name="toolkit")
    assert getattr(done.exception, "exit_code", done.exit_code) == 2 or isinstance(done.exception, Refusal), done.output
    assert said in done.output + str(done.exception)
    assert "Traceback" not in done.output


def test_everything_is_as_it_was_afterwards() -> None:
    """Fails when: a wrapper or a hook stays behind."""
    before = {name: getattr(tk, name) for name in ("train_step", "load_model", "build_dataloaders", "build_optimizer")}
    others = (torch.nn.functional.cross_entropy, torch.nn.utils.clip_grad_norm_, torch.optim.Optimizer.__init__)
    doctor("basic", "--max-length", "32")
    assert {name: getattr(tk, name) for name in before} == before
    assert (torch.nn.functional.cross_entropy, torch.nn.utils.clip_grad_norm_, torch.optim.Optimizer.__init__) == others


def test_a_model_directory_is_made_small_and_keeps_its_kind(tmp_path: Path) -> None:
    """Fails when: heads, groups or layer types no longer fit each other in the small configuration, or a teacher of the student's
    shape has its weights: distill's loss was 0."""
    config = transformers.Qwen3Config(
        vocab_size=300, hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
        intermediate_size=512,
    )  # fmt: skip
    tk.train_tokenizer(["a few words"] * 50, vocab_size=300).save_pretrained(tmp_path / "large")
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "large")
    model = config_class_of_file(planted.RECIPES / "distill.py")(model=str(tmp_path / "large"), teacher=str(tmp_path / "large"))
    small = with_small_teacher(with_small_model(model, tmp_path / "small"), tmp_path / "teacher")
    read = transformers.AutoConfig.from_pretrained(small.model)
    assert small.model == str(tmp_path / "small")
    assert (read.model_type, read.num_hidden_layers, read.hidden_size, read.num_attention_heads, read.num_key_value_heads) == ("qwen3", 2, 64, 4, 1)
    weights, others = (transformers.AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (small.model, small.teacher))
    assert all(not torch.equal(tensor, others[name]) for name, tensor in weights.items() if tensor.dim() > 1)
    with pytest.raises(Refusal, match="neither a directory nor"):
        with_small_model(tk.ModelConfig(model=str(tmp_path / "nothing")), tmp_path / "other")


def test_a_classifier_without_a_teacher_gets_one_of_the_datas_classes(tmp_path: Path) -> None:
    """Fails when: one is asked for, or it is a language model."""
    config = config_class_of_file(planted.RECIPES / "distill_classifier.py")(max_train_examples=40)
    read = transformers.AutoConfig.from_pretrained(with_small_teacher(config, tmp_path).teacher)
    assert read.architectures == ["BertForSequenceClassification"]
    assert read.label2id == tk.label_settings(tk.load_splits(config), config)["label2id"]


def test_a_teacher_that_is_made_up_is_not_the_student() -> None:
    """A student of the same shape. Fails when: both are drawn from one seed, so that there is nothing to learn."""
    code, report = doctor("distill_classifier", "--match-layers", "none", "--cross-entropy-share", "0", "--only", "overfit")
    assert (code, report["findings"]) == (0, [])


def test_a_refusal_of_a_model_names_the_one_that_was_given(tmp_path: Path) -> None:
    """Fails when: it names the small copy in the temporary directory."""
    model, script = write_classifier(tmp_path / "model"), tmp_path / "refusing.py"
    script.write_text(
        "from dataclasses import dataclass\nimport toolkit as tk\n@dataclass(frozen=True)\nclass Config(tk.ModelConfig, tk.RunConfig):\n    pass\n"
        "def main(config: Config) -> None:\n    raise tk.Refusal(f'--model {config.model}: of no use here.')\n"
    )
    done = CliRunner().invoke(app, ["doctor", str(script), "--model", model], prog_name="toolkit")
    assert str(done.exception) == f"--model {model}: of no use here."


@pytest.mark.slow
def test_a_frozen_head_can_be_learned_with(tmp_path: Path) -> None:
    """Cohere's head, whose logits its config divides by 16. Fails when: the small model's head stays as it is drawn, or its rows
    get one length and not their logits one spread (8.33 and 7.86 after sixty steps)."""
    tokenizer = tk.load_tokenizer(tk.ModelConfig())
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.CohereConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, **ids
    )
    transformers.CohereForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, report = doctor("lora", "--model", str(tmp_path), "--only", "overfit", "--only", "start", "--only", "tokenizer")
    assert (code, report["findings"]) == (0, [])
    note = next(each["note"] for each in report["checks"] if each["check"] == "overfit")
    first, last = (float(part.split()[-1]) for part in note.split(", after"))
    assert last < 0.7 * first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words", "check"),
    [
        ("bert", "masked_lm --use-peft", "overfit"), ("bert", "token_classification --use-peft", "saved"),
        ("bert", "embedding --use-peft", "trained"), ("bert", "reward", "evaluation"), ("llama", "diffusion --use-peft", "saved"),
    ],
)  # fmt: skip
def test_a_model_of_a_directory_is_not_accused(kind: str, words: str, check: str, tmp_path: Path) -> None:
    """Fails when, by row: as much is wanted of an adapter under a frozen head as of a whole model; a saved adapter is read on a base of
    two classes; a pooler that no embedding passes gets an adapter; two updates' rounding in rewards counts as a mistake of the
    evaluation; a saved adapter is read on a base without the mask's row, or with causal attention."""
    tokenizer = tk.load_tokenizer(tk.ModelConfig(model=f"tiny-{kind}"))
    sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **sizes, **ids)
    make: Any = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    make.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    recipe, *flags = words.split()
    code, report = doctor(recipe, "--model", str(tmp_path), *flags, "--only", check)
    assert (code, report["findings"]) == (0, [])
