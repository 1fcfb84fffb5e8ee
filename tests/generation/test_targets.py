"""Texts of encoder-decoders: those of transformers' generate on each source alone, whatever the batch; draws by row and seed."""

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from toolkit.config import GeneratedTextConfig
from toolkit.data.loading.collate import collate_seq2seq
from toolkit.generation.targets import generate_targets
from toolkit.models.encoder_decoder import decoder_start, set_target_language
from toolkit.models.tokenizer import train_tokenizer

SMALL = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64, "forced_eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["a few words to learn from, and a few more of them"] * 4, vocab_size=270)


def model_of(family: str, tokenizer: Any) -> Any:
    torch.manual_seed(3)
    special = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    if family == "t5":
        config = T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, **special, decoder_start_token_id=special["pad_token_id"])
        model: Any = T5ForConditionalGeneration(config)
    else:
        model = BartForConditionalGeneration(BartConfig(**SMALL, **special, decoder_start_token_id=special["eos_token_id"]))
        model.final_logits_bias = torch.zeros(1, len(tokenizer))
        model.final_logits_bias[0, tokenizer.eos_token_id] = 4.0  # some texts end
    with torch.no_grad():  # wide weights, so that what is written depends on the source
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.5)
    return model.eval()


def sources(examples: int, tokenizer: Any) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    rows = [draw.integers(4, len(tokenizer), draw.integers(1, 20)) for _ in range(examples)]
    return [{"input_ids": np.append(row, [5, tokenizer.eos_token_id]), "source_tokens": len(row)} for row in rows]


def texts_in_batches(model: Any, tokenizer: Any, config: GeneratedTextConfig, rows: list[dict[str, Any]], size: int) -> list[list[int]]:
    collate = partial(collate_seq2seq, pad_token_id=tokenizer.pad_token_id, decoder_start_token_id=decoder_start(model))
    generate = generate_targets(Accelerator(cpu=True), tokenizer, config, 9)
    found: list[list[int]] = []
    for start in range(0, len(rows), size):
        ids = generate(model, collate(rows[start : start + size]))
        assert ids.shape[1] <= 9
        found += [[token for token in row if token != tokenizer.pad_token_id] for row in ids.tolist()]
    return found


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_texts_are_those_of_each_source_alone_whatever_the_batch(family: str, beams: int, tokenizer: Any) -> None:
    """Fails when: padding of a source is attended to; the number of beams or the length penalty is not handed on."""
    model, rows = model_of(family, tokenizer), sources(13, tokenizer)
    config = GeneratedTextConfig(num_beams=beams, length_penalty=0.3 if beams > 1 else None)
    wanted = []
    for row in rows:
        ids = torch.tensor(row["input_ids"][: row["source_tokens"]])[None]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=beams, length_penalty=0.3, max_new_tokens=9, do_sample=False)
        wanted.append([token for token in out[0, 1:].tolist() if token != tokenizer.pad_token_id])
    assert len({tuple(text) for text in wanted}) > 3
    assert len({len(text) for text in wanted}) > 1 or family == "t5"
    for size in (1, 3, 8):
        assert texts_in_batches(model, tokenizer, config, rows, size) == wanted


def test_drawn_texts_are_the_same_in_every_batch_and_others_with_another_seed(tokenizer: Any) -> None:
    """Fails when: rows draw from one generator; the seed does not enter."""
    model, rows = model_of("t5", tokenizer), sources(13, tokenizer)
    drawn = partial(GeneratedTextConfig, do_sample=True, temperature=1.3, top_p=0.9)
    alone = texts_in_batches(model, tokenizer, drawn(), rows, 1)
    state = torch.get_rng_state()
    assert texts_in_batches(model, tokenizer, drawn(), rows, 8) == alone
    assert torch.equal(torch.get_rng_state(), state)
    assert texts_in_batches(model, tokenizer, drawn(seed=7), rows, 8) != alone
    assert texts_in_batches(model, tokenizer, GeneratedTextConfig(num_beams=1), rows, 8) != alone


def test_first_tokens_are_drawn_as_often_as_their_probabilities_say(tokenizer: Any) -> None:
    """600 seeds, one source; each of the likely tokens within five standard deviations of what temperature and top-p give.

    Fails when: the temperature is applied after the noise; the tail that top-p cuts off is drawn from.
    """
    model, rows = model_of("t5", tokenizer), sources(1, tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3.0)
    ids = torch.tensor(rows[0]["input_ids"][: rows[0]["source_tokens"]])[None]
    with torch.no_grad():
        logits = model(input_ids=ids, decoder_input_ids=torch.tensor([[tokenizer.pad_token_id]])).logits[0, -1]
    order = (logits / 0.7).softmax(-1).sort(descending=True)
    kept = int((order.values.cumsum(-1) - order.values < 0.8).sum())
    wanted = dict(zip(order.indices[:kept].tolist(), (order.values[:kept] / order.values[:kept].sum()).tolist(), strict=True))
    accelerator, seen = Accelerator(cpu=True), Counter[int]()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for seed in range(600):
        config = GeneratedTextConfig(do_sample=True, temperature=0.7, top_p=0.8, seed=seed)
        seen[int(generate_targets(accelerator, tokenizer, config, 1)(model, batch)[0, 0])] += 1
    assert seen.keys() <= wanted.keys()
    for token, share in wanted.items():
        assert abs(seen[token] / 600 - share) < 5 * (share * (1 - share) / 600) ** 0.5 + 1e-9


def test_generation_leaves_the_model_as_it_was(tokenizer: Any) -> None:
    """Fails when: the model's own generation_config is written to; it comes back in another mode."""
    model = model_of("bart", tokenizer).train()
    before = model.generation_config.to_dict()
    texts_in_batches(model, tokenizer, GeneratedTextConfig(num_beams=2, no_repeat_ngram_size=2), sources(2, tokenizer), 2)
    assert model.generation_config.to_dict() == before
    assert model.training


def test_a_target_language_is_what_generation_begins_with() -> None:
    """mBART-50 and NLLB force it as the first token; mBART-25 begins the decoder with it, behind which its targets were learned.

    Fails when: one family's way is taken for the other's.
    """
    from transformers import MBart50Tokenizer, MBartTokenizer, NllbTokenizer

    for make, code, forced in ((MBart50Tokenizer, "ro_RO", True), (NllbTokenizer, "ron_Latn", True), (MBartTokenizer, "ro_RO", False)):
        tokenizer = make()
        tokenizer.src_lang, tokenizer.tgt_lang = code, code
        model = MBartForConditionalGeneration(MBartConfig(**SMALL, vocab_size=len(tokenizer), pad_token_id=1, eos_token_id=2))
        set_target_language(model, tokenizer)
        language = tokenizer.convert_tokens_to_ids(code)
        assert (model.generation_config.forced_bos_token_id == language) == forced
        assert (model.generation_config.decoder_start_token_id == language) != forced
        config = GeneratedTextConfig(num_beams=2)
        ids = generate_targets(Accelerator(cpu=True), tokenizer, config, 4)(model.eval(), {"input_ids": torch.tensor([[5, 2]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)})
        assert int(ids[0, 0]) == language or not forced
