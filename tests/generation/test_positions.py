"""How far a model writes whose positions begin behind its pad token, as RoBERTa's do: 40 in its config are 38 tokens."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator

import toolkit as tk
from toolkit.config import Refusal
from toolkit.generation.answers import Sampling, answer_prompts
from toolkit.generation.continued_texts import continue_texts
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.filled_texts import fill_text
from toolkit.generation.sampler import sample_groups
from toolkit.generation.written_rows import asked_of, write_rows

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def roberta(kind: str, **settings: Any) -> tuple[Any, Any]:
    tokenizer = tk.train_tokenizer(["one two three"], vocab_size=270)
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=40, pad_token_id=1, eos_token_id=None, bos_token_id=None, **SIZES, **settings
    )
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).eval(), tokenizer


def test_a_masked_model_fills_all_of_its_positions_and_no_more() -> None:
    """Fails when: the number of its config is taken for that of its tokens, and the last ones have no position."""
    diffusion = {"mask_token_id": 3, "shift_logits": False, "answer_length": 0}
    model, tokenizer = roberta("RobertaForMaskedLM", diffusion=diffusion)
    mask, given = tokenizer.convert_ids_to_tokens(3), len(tokenizer("one", add_special_tokens=False).input_ids)
    assert fill_text(model, tokenizer, f"one{mask}*{38 - given}", max_new_tokens=1, steps=1)
    assert fill_text(model, tokenizer, "one", max_new_tokens=64, steps=1)
    with pytest.raises(Refusal, match="40 tokens, and the model 38 positions"):
        fill_text(model, tokenizer, f"one{mask}*{40 - given}", max_new_tokens=1, steps=1)


def test_a_decoder_writes_to_its_last_position() -> None:
    """Fails when: the number of its config is taken for that of its tokens."""
    model, tokenizer = roberta("RobertaForCausalLM", is_decoder=True)
    assert answer_prompts(model, tokenizer, ["one two"], Sampling(max_new_tokens=64, temperature=0.0), lambda number, piece: None) != [""]


def test_samples_and_written_rows_end_at_the_last_position(tmp_path: Path) -> None:
    """Fails when: a continuation begins so late, or goes so far, that its last tokens have no position."""
    model, tokenizer = roberta("RobertaForCausalLM", is_decoder=True)
    for most in (64, 4):
        assert continue_texts(Accelerator(cpu=True), model, tokenizer, ["one two three " * 20], max_new_tokens=most)
    for count, fits in ((36, True), (38, False)):  # tokens
        rows = asked_of([{"prompt": "o" * count, "origin": "row 1"}], tokenizer, raw=True)
        assert len(tokenizer("o" * count, add_special_tokens=False).input_ids) == count
        with contextlib.nullcontext() if fits else pytest.raises(Refusal, match="38 positions"):
            write_rows(
                model, tokenizer, rows, tmp_path / f"{count}.jsonl", settings=SamplingSettings(max_new_tokens=64), seed=0, writer="x", made_of={}
            )


def test_a_completion_beyond_the_last_position_is_refused() -> None:
    """Fails when: 40 are allowed, of which the last two have no position."""
    model, tokenizer = roberta("RobertaForCausalLM", is_decoder=True)
    keys = np.zeros((1, 1), dtype=np.uint64)
    for most in (18, 19):
        with contextlib.nullcontext() if most == 18 else pytest.raises(Refusal, match="38 positions"):
            sample_groups(model, [[5] * 20], keys, SamplingSettings(max_new_tokens=most, temperature=0.0), tokenizer)
