"""How far a model writes whose positions begin behind its pad token, as RoBERTa's do: 40 in its config are 38 tokens."""

from typing import Any

import pytest
import torch
import transformers

import toolkit as tk
from toolkit.config import Refusal
from toolkit.generation.answers import Sampling, answer_prompts
from toolkit.generation.filled_texts import fill_text

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
