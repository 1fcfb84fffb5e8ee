"""Classification with a decoder: the token whose score is the text's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import toolkit as tk

TEXTS = ["one two", "three four five six", "seven", "eight nine ten eleven twelve"]


@pytest.mark.parametrize("recipe", ["accelerated", "basic"])
def test_a_decoder_is_read_at_the_end_of_a_text_though_its_pad_token_is_that_end(
    run_recipe: Any, tmp_path: Path, recipe: str
) -> None:  # fmt: skip
    """The logits of a padded batch are the head's at each text's end token, by a plain product.

    Fails when: the recipe leaves pad_apart_from_end out: transformers takes the token before.
    """
    base = tmp_path / "base"
    tokenizer = tk.train_tokenizer([" ".join(TEXTS)] * 5, 300)
    end = tokenizer.eos_token
    tokenizer.pad_token = end
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)])
    tokenizer.save_pretrained(base)
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(base)
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"{text} {i},{i % 2}\n" for i in range(10) for text in TEXTS))
    run = run_recipe(recipe, "--model", str(base), "--dataset", "rows.csv", "--max-steps", "2", "--use-cpu")
    assert run.code == 0, run.out + run.err

    folder = run.output_dir / "model"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    ends = batch["attention_mask"].sum(1) - 1
    assert (batch["input_ids"][range(4), ends] == tokenizer.convert_tokens_to_ids(end)).all()
    with torch.no_grad():
        hidden = model.model(**batch).last_hidden_state[range(4), ends]
        torch.testing.assert_close(model(**batch).logits, hidden @ model.score.weight.T)
