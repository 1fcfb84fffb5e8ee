"""Causal architectures that see both sides: alone, padded and packed, saved and loaded, and what is refused."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict

from toolkit.config import DataConfig, DiffusionConfig, ModelConfig, Refusal
from toolkit.data.tokenize.tasks import tokenize_for_diffusion
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.sampler import sample_groups
from toolkit.models.diffusion import Diffusion, diffusion_of, load_diffusion_model, with_mask_token
from toolkit.models.load import load_model
from toolkit.models.tokenizer import train_tokenizer

SHAPE = {
    "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen3": {"head_dim": 8}, "Mistral": {"sliding_window": None}, "Phi3": {},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}, "SmolLM3": {}, "Olmo2": {},
}  # fmt: skip


@dataclass(frozen=True)
class Config(ModelConfig, DataConfig, DiffusionConfig):
    max_length: int = 32


@pytest.fixture(scope="module")
def tokenizer():
    return with_mask_token(train_tokenizer(["one and two and three, said again and again"] * 30, 290))


def saved(folder: Path, family: str, tokenizer: Any, **settings: Any) -> str:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**{**SHAPE, **ARCHITECTURES.get(family, {}), **settings}))
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(folder / "causal")
    tokenizer.save_pretrained(folder / "causal")
    return str(folder / "causal")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_an_architecture_sees_both_sides_alone_padded_and_packed(tmp_path: Path, tokenizer: Any, family: str) -> None:
    """Each document's logits in a packed row, and padded, are its own alone, as transformers computes them under a whole mask.

    Fails when: layers stay causal where there is nothing to mask, or documents of a packed row see each other.
    """
    config = Config(model=saved(tmp_path, family, tokenizer))
    plain, packed = (load_diffusion_model(config, tokenizer, packed=packed).eval() for packed in (False, True))
    assert diffusion_of(plain) == Diffusion(tokenizer.mask_token_id, True, 128)
    documents = [torch.randint(3, 280, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 5, 12)]
    whole = torch.zeros(1, 1, 12, 12)
    with torch.no_grad():
        alone = [plain(input_ids=ids[None]).logits[0] for ids in documents]
        changed = documents[0].clone()
        changed[-1] = 4
        assert not torch.equal(plain(input_ids=changed[None]).logits[0, 0], alone[0][0])
        reference = transformers.AutoModelForCausalLM.from_pretrained(config.model, attn_implementation="eager").eval()
        of_reference = reference(input_ids=documents[2][None], attention_mask=whole).logits[0]
        assert (of_reference - alone[2]).abs().max() < 1e-4
        padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in documents], batch_first=True)
        of_padded = plain(input_ids=padded, attention_mask=mask).logits
        bounds = torch.tensor([0, 9, 14, 26], dtype=torch.int32)
        of_packed = packed(
            input_ids=torch.cat(documents)[None], position_ids=torch.cat([torch.arange(len(ids)) for ids in documents])[None],
            cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=12, max_length_k=12,
        ).logits[0]  # fmt: skip
    for i, (start, end) in enumerate(((0, 9), (9, 14), (14, 26))):
        assert (of_packed[start:end] - alone[i]).abs().max() < 1e-4
        assert (of_padded[i, : end - start] - alone[i]).abs().max() < 1e-4


def test_what_was_saved_is_loaded_as_it_was_and_refused_by_what_writes_from_left_to_right(tmp_path: Path, tokenizer: Any) -> None:
    """Fails when: a saved model forgets its direction, or next-token prediction and its cache take it."""
    model = load_diffusion_model(Config(model=saved(tmp_path, "Llama", tokenizer), answer_length=7), tokenizer)
    model.save_pretrained(tmp_path / "both")
    tokenizer.save_pretrained(tmp_path / "both")
    config = Config(model=str(tmp_path / "both"), answer_length=7)
    again, ids = load_diffusion_model(config, tokenizer).eval(), torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=ids).logits, again(input_ids=ids).logits)
    assert diffusion_of(again) == Diffusion(tokenizer.mask_token_id, True, 7)
    with pytest.raises(Refusal, match="bidirectional"):
        load_model("AutoModelForCausalLM", config, tokenizer)
    with pytest.raises(Refusal, match="attends to both sides"):
        sample_groups(again, [[3, 4]], np.zeros((1, 1), np.uint64), SamplingSettings(max_new_tokens=2))
    with pytest.raises(Refusal, match="can't be changed"):
        load_diffusion_model(replace(config, shift_logits=False), tokenizer)
    with pytest.raises(Refusal, match="begins from a causal model"):
        load_diffusion_model(replace(config, attention_annealing=0.5), tokenizer)


def test_texts_of_an_encoder_end_with_its_separator(tokenizer: Any) -> None:
    """BERT's and ModernBERT's tokenizers have no end-of-text token. Fails when: none is set, and every text is refused."""
    encoder = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, sep_token=tokenizer.eos_token)
    assert with_mask_token(encoder).eos_token_id == tokenizer.eos_token_id
    rows = DatasetDict(train=Dataset.from_dict({"text": ["a b c"] * 4, "origin": [f"rows.txt:{n}" for n in range(4)]}))
    assert tokenize_for_diffusion(rows, encoder, Config())["train"][0]["input_ids"][-1] == encoder.sep_token_id


_SMALL = {"vocab_size": 300, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32, "pad_token_id": 0}


@pytest.mark.parametrize(
    "config",
    [
        transformers.MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0),
        transformers.Lfm2Config(**_SMALL, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        transformers.JambaConfig(**_SMALL, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1, use_mamba_kernels=False),
        transformers.MptConfig(vocab_size=300, d_model=16, n_heads=2, n_layers=1, max_seq_len=64),
    ],
    ids=lambda config: config.model_type,
)
def test_models_some_of_whose_layers_cannot_look_ahead_are_refused(tmp_path: Path, tokenizer: Any, config: Any) -> None:
    """Fails when: a recurrent model is trained as if it saw both sides, one attention layer of a hybrid is enough, or the
    error of a forward pass without a causal mask is shown as it is."""
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(Refusal, match="both sides"):
        load_diffusion_model(Config(model=str(tmp_path / "model")), tokenizer)


def test_settings_that_fit_no_model_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    """Fails when: sliding windows are packed, or a masked language model is trained to predict the next token."""
    windows = Config(model=saved(tmp_path, "Gemma2", tokenizer, head_dim=8, sliding_window=6))
    for refused, packed in ((windows, True), (replace(windows, attention_annealing=0.5), False)):
        with pytest.raises(Refusal, match="sliding windows"):
            load_diffusion_model(refused, tokenizer, packed=packed)
    load_diffusion_model(windows, tokenizer)
    with pytest.raises(Refusal, match=r"--shift-logits: tiny-bert .*masked"):
        load_diffusion_model(Config(model="tiny-bert", shift_logits=True), tokenizer)
    with pytest.raises(Refusal, match="encoder-decoder"):
        load_diffusion_model(Config(model="tiny-t5"), tokenizer)
