"""The recipes themselves, unchanged, on shards: what one process trains, evaluates, samples and saves."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {"zero3": ["--deepspeed", str(ROOT / "tests/all_sharded.json")], "fsdp2": ["--fsdp"]}
SMALL = [
    "--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "40", "--max-eval-examples", "3", "--max-length", "64",
    "--max-steps", "4", "--logging-steps", "1", "--global-batch-size", "6", "--per-device-train-batch-size", "2", "--dropout", "0",
    "--eval-strategy", "steps", "--eval-steps", "2", "--load-best-model-at-end", "--async-save", "--learning-rate", "1e-3", "--use-cpu",
]  # fmt: skip
RECIPES = {
    # a lower rate: at 1e-3 AdamW's first steps grow rounding of 1e-7 to 1e-5 by the fourth loss
    "embedding": ["--two-way", "--false-negative-margin", "0.1", "--learning-rate", "2e-4"],
    "accelerated": [],
    "sft": ["--num-samples", "1", "--sample-max-new-tokens", "4", "--max-length", "512"],
    "pretrain": ["--max-train-examples", "8", "--vocab-size", "300", "--num-samples", "1", "--sample-max-new-tokens", "4"],
    "masked_lm": ["--max-train-examples", "4", "--max-eval-examples", "1", "--vocab-size", "300"],
    "diffusion": ["--num-samples", "1", "--sample-max-new-tokens", "4", "--max-train-examples", "8", "--max-eval-examples", "1", "--vocab-size", "300"],
    "dpo": ["--num-samples", "1", "--sample-max-new-tokens", "4", "--max-length", "256"],
    "kto": ["--num-samples", "1", "--sample-max-new-tokens", "4", "--max-length", "256"],
    "lora": ["--num-samples", "0", "--max-length", "512"],
    "distill": ["--num-samples", "0", "--dataset", "stdlib:sft", "--max-length", "512", "--teacher", "teacher", "--learning-rate", "2e-4"],
    "distill_classifier": ["--teacher", "teacher", "--match-attention", "--attention-dropout", "0", "--learning-rate", "2e-4"],
    "reward": ["--max-length", "256"],
    "reranker": ["--ranking-loss", "bce"],  # from random weights the others have gradients near 0
    # the bias of its head moves all choices alike: its gradient is rounding, of which AdamW makes whole steps
    "multiple_choice": ["--learning-rate", "2e-4"],
    "question_answering": ["--doc-stride", "16", "--num-samples", "1"],
    "token_classification": [],
    "seq2seq": ["--num-samples", "1", "--max-target-length", "8", "--num-beams", "2"],
    "dpo with a second model": ["--num-samples", "0", "--max-length", "256", "--reference", "model", "--pair-layout", "padded"],
}
# What FSDP2 refuses: a parameter of a head or an encoder that is more modules' than the two embeddings'.
TIED_ELSEWHERE = {"masked_lm": "cls.predictions.decoder.bias", "seq2seq": "encoder.embed_tokens.weight"}
# The engines in turn, and both where a loss is the base of others or FSDP2 refuses.
CELLS = list(zip(RECIPES, itertools.cycle(ENGINES)))
CELLS += [(recipe, engine) for recipe in ("sft", "dpo", *TIED_ELSEWHERE) for engine in ENGINES if (recipe, engine) not in CELLS]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "engine"), CELLS)
def test_a_recipe_on_shards_is_the_recipe(tiny: Any, recipe: str, engine: str) -> None:
    """Losses, norms and evaluations to 1e-5, and a model that loads. With Muon, samples, background saves and the best weights.

    Fails when: `apply_sharded_state` puts the best weights into the masters alone, or a save outlives its gathered tensors.
    """
    flags, script = [*SMALL, *RECIPES[recipe]], str(ROOT / f"recipes/{recipe.split()[0]}.py")
    if recipe == "distill":
        taught = tiny(*SMALL, "--num-samples", "0", "--max-length", "512", script=str(ROOT / "recipes/sft.py"), output_dir="teacher")
        assert taught.code == 0, taught.out[-3000:]
    if recipe == "distill_classifier":
        taught = tiny(*SMALL, script=str(ROOT / "recipes/accelerated.py"), output_dir="teacher")
        assert taught.code == 0, taught.out[-3000:]
    ranks = tiny.ranks(2, *flags, *ENGINES[engine], script=script, output_dir="two")
    if engine == "fsdp2" and recipe in TIED_ELSEWHERE:
        assert [rank.code for rank in ranks] == [2, 2], ranks[0].out[-3000:]
        assert TIED_ELSEWHERE[recipe] in ranks[0].out
        return
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    one = tiny(*flags, script=script, output_dir="one")
    assert one.code == 0, one.out[-3000:]
    for name in ("loss", "grad_norm", "eval_loss"):
        found, expected = ([event[name] for event in run.metrics if name in event] for run in (ranks[0], one))
        assert len(expected) >= 2
        assert found == pytest.approx(expected, rel=1e-5)
    file = "model/adapter_model.safetensors" if recipe == "lora" else "model/model.safetensors"
    ours, its = (load_file(run.folder / file) for run in (ranks[0], one))
    assert ours.keys() == its.keys()
    assert all(ours[name].dtype == its[name].dtype and (ours[name] - its[name]).abs().max() < 1e-4 for name in its)
