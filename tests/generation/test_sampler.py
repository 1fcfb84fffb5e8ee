"""The sampler: transformers' greedy tokens, a plain forward's log-probabilities, and the same bits for any batch."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
    SmolLM3Config,
    T5Config,
)

from toolkit.config import Refusal
from toolkit.distributed.compat import forget_process_state
from toolkit.generation.distribution import SamplingSettings, shaped_logits
from toolkit.generation.random_numbers import completion_key, exponentials
from toolkit.generation.sampler import sample_groups, takes_groups
from toolkit.models.tokenizer import train_tokenizer

SMALL = {
    "vocab_size": 120, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 200,
}  # fmt: skip
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "gemma2": Gemma2Config(**SMALL, sliding_window=8),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "gpt2": GPT2Config(vocab_size=120, n_embd=48, n_layer=2, n_head=4, n_positions=200, **ENDS),
    "olmo2": Olmo2Config(**{**SMALL, "num_key_value_heads": 4}, **ENDS),
    "phi3": Phi3Config(**SMALL, **ENDS),
    "smollm3": SmolLM3Config(**SMALL, **ENDS),
    "bloom": BloomConfig(vocab_size=120, hidden_size=48, n_layer=2, n_head=4, **ENDS),
}
PROMPTS = [np.random.default_rng(length).integers(3, 120, length).tolist() for length in (5, 70, 1, 9)]
KEYS = np.array([[completion_key(0, 0, prompt, index) for index in range(4)] for prompt in range(4)], dtype=np.uint64)
DRAWN = SamplingSettings(max_new_tokens=24, temperature=0.8, eos_token_ids=(2, 7, 9))
CUT = SamplingSettings(max_new_tokens=24, top_k=40, top_p=0.9, min_p=0.01, eos_token_ids=(2, 7))


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    if name == "t5":
        config = T5Config(vocab_size=120, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, **ENDS)
        model = AutoModelForSeq2SeqLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for parameter in model.parameters():
        if parameter.ndim > 1:  # far from uniform distributions
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


@pytest.mark.parametrize("name", [*CONFIGS, "t5"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_tokens_are_those_of_transformers(name: str, penalty: float) -> None:
    """Fails when: `positions` of `_Groups.next` stay where they are, a window's mask is one place wider, or `penalized` swaps * and /."""
    model = model_of(name)
    settings = SamplingSettings(max_new_tokens=20, temperature=0, repetition_penalty=penalty, eos_token_ids=(2,))
    found = sample_groups(model, PROMPTS, KEYS[:, :2], settings)
    for prompt, group in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        generation = GenerationConfig(
            max_new_tokens=20, do_sample=False, repetition_penalty=penalty, eos_token_id=2, pad_token_id=0, decoder_start_token_id=0
        )
        if name == "t5" and penalty != 1:  # transformers counts the decoder's tokens alone, of which the prompt is none
            continue
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)[0]
        wanted = output[1:] if name == "t5" else output[len(prompt) :]
        assert [completion.tokens for completion in group] == [wanted.tolist()] * 2


@pytest.mark.parametrize("settings", [DRAWN, CUT], ids=["drawn", "cut"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma2", "gpt2"])
def test_bits_do_not_depend_on_the_batch(name: str, settings: SamplingSettings) -> None:
    """All groups at once, each alone, and in another order with fewer completions: tokens and log-probabilities to the last bit.

    Fails when: `rows_for_equal_bits` returns 1, KEYS is 1, or the noise is drawn from a generator.
    """
    model = model_of(name)
    together = sample_groups(model, PROMPTS, KEYS, settings)
    alone = [sample_groups(model, [prompt], KEYS[i : i + 1], settings)[0] for i, prompt in enumerate(PROMPTS)]
    fewer = sample_groups(model, PROMPTS[::-1], KEYS[::-1, :2], settings, cache_bytes=1)[::-1]
    assert len({tuple(each.tokens) for group in together for each in group}) == 16
    assert _first_difference(alone, together) is None
    assert _first_difference(fewer, [group[:2] for group in together]) is None


def _first_difference(one: Any, other: Any) -> Any:
    for a, b in zip((each for group in one for each in group), (each for group in other for each in group), strict=True):
        if (a.tokens, a.logps, a.truncated) != (b.tokens, b.logps, b.truncated):
            return a, b
    return None


@pytest.mark.parametrize("settings", [DRAWN, CUT], ids=["drawn", "cut"])
@pytest.mark.parametrize("name", [*CONFIGS, "t5"])
def test_log_probabilities_are_those_of_one_plain_forward(name: str, settings: SamplingSettings) -> None:
    """To 1e-5 in float32. Fails when: `draw` returns log-probabilities before the temperature, or `kept` is of the next token."""
    model = model_of(name)
    for prompt, group in zip(PROMPTS, sample_groups(model, PROMPTS, KEYS, settings), strict=True):
        for each in group:
            with torch.no_grad():
                if name == "t5":
                    decoded = torch.tensor([[0, *each.tokens[:-1]]])
                    logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoded).logits[0]
                else:
                    logits = model(torch.tensor([prompt + each.tokens])).logits[0, len(prompt) - 1 : -1]
            logits = logits / settings.temperature
            if each.kept is not None:
                kept = torch.zeros_like(logits, dtype=torch.bool)
                for row, ids in enumerate(each.kept):
                    kept[row, torch.from_numpy(ids).long()] = True
                assert kept.gather(1, torch.tensor(each.tokens)[:, None]).all()
                logits = logits.masked_fill(~kept, -torch.inf)
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(each.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(each.logps), wanted, atol=1e-5, rtol=0)
            assert each.truncated == (each.tokens[-1] not in settings.eos_token_ids)
            assert not each.truncated or len(each.tokens) == settings.max_new_tokens


def test_first_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    """20,000 completions of one token: total variation from the softmax below .03 (expected about .02).

    Fails when: `exponentials` takes the logarithm of its draws twice, or ignores the token's id.
    """
    model = model_of("llama")
    keys = np.array([[completion_key(1, 0, 0, index) for index in range(20_000)]], dtype=np.uint64)
    (group,) = sample_groups(model, PROMPTS[:1], keys, SamplingSettings(max_new_tokens=1, temperature=1.3))
    with torch.no_grad():
        wanted = (model(torch.tensor(PROMPTS[:1])).logits[0, -1] / 1.3).softmax(-1).double().numpy()
    counts = Counter(each.tokens[0] for each in group)
    found = np.array([counts[token] for token in range(120)]) / len(group)
    assert abs(found - wanted).sum() / 2 < 0.03


def test_exponentials_are_exponential_and_a_function_of_key_position_and_token() -> None:
    """Fails when: `_words` leaves out the position."""
    ids = torch.arange(1000, dtype=torch.int32)
    keys = np.array([completion_key(0, 0, 0, index) for index in range(50)], dtype=np.uint64)
    draws = exponentials(keys, 3, ids)
    assert abs(float(draws.mean()) - 1) < 0.02
    assert abs(float(draws.std()) - 1) < 0.02
    assert float(draws.min()) > 0
    assert torch.equal(exponentials(keys[7:8], 3, ids[5:9])[0], draws[7, 5:9])
    assert not torch.equal(exponentials(keys, 4, ids), draws)
    assert len({completion_key(*key) for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}) == 5


@pytest.mark.parametrize("values", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}])
def test_what_is_cut_off_is_what_transformers_cuts_off(values: dict[str, float]) -> None:
    """Fails when: the token that reaches top_p is cut off, or min_p is taken of the sum in place of the highest."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(50, 120, generator=torch.Generator().manual_seed(0)) * 2
    wanted = logits / 0.7
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    for name, warper in warpers.items():
        if name in values:
            wanted = warper(values[name])(None, wanted)
    found = shaped_logits(logits, SamplingSettings(temperature=0.7, **values))  # type: ignore[arg-type]
    assert torch.equal(found, wanted)


def test_an_adapter_is_sampled_without_being_merged_and_the_model_is_left_as_it_was() -> None:
    """Fails when: the base's attention function is not put back, or modules stay in evaluation mode."""
    model = get_peft_model(model_of("llama"), LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    model.train()
    before = model.get_base_model().config._attn_implementation
    found = sample_groups(model, PROMPTS, KEYS[:, :1], SamplingSettings(max_new_tokens=8, temperature=0))
    assert model.training
    assert model.get_base_model().config._attn_implementation == before
    merged = model.merge_and_unload().eval()
    for prompt, (each,) in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        output = merged.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert each.tokens == output[0, len(prompt) :].tolist()


def test_stop_strings_end_a_completion_behind_the_token_that_completes_them() -> None:
    """Fails when: `_StopStrings.found` looks at the last token alone, or the completion counts as truncated."""
    tokenizer = train_tokenizer(["a few words to learn from, and a few more of them"] * 4, vocab_size=270)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SMALL, "vocab_size": len(tokenizer)})).eval()
    prompt = tokenizer("a few")["input_ids"]
    keys = np.array([[completion_key(0, 0, 0, index) for index in range(200)]], dtype=np.uint64)
    stops = tuple(text for letter in "abcdfghijklm" for text in (f"{letter}e", f"e{letter}"))
    settings = SamplingSettings(max_new_tokens=30, temperature=1.0, stop_strings=stops)
    (group,) = sample_groups(model, [prompt], keys, settings, tokenizer)
    ended = [each for each in group if not each.truncated]
    assert ended
    assert any(len(each.tokens) == 30 for each in group)
    for each in group:
        text, before = tokenizer.decode(each.tokens), tokenizer.decode(each.tokens[:-1])
        assert each.truncated != any(stop in text for stop in settings.stop_strings)
        assert not any(stop in before for stop in settings.stop_strings)
    with pytest.raises(Refusal, match="tokenizer"):
        sample_groups(model, [prompt], keys, settings)


def test_no_end_token_comes_before_the_least_length() -> None:
    """Fails when: `min_new_tokens` is compared with `<=`."""
    settings = SamplingSettings(max_new_tokens=12, min_new_tokens=5, eos_token_ids=tuple(range(60)))
    lengths = [len(each.tokens) for group in sample_groups(model_of("llama"), PROMPTS, KEYS, settings) for each in group]
    assert min(lengths) == 6
    assert max(lengths) <= 12


def test_a_prompt_that_leaves_no_room_is_refused_by_its_number() -> None:
    """Fails when: `_check_room` is dropped."""
    with pytest.raises(Refusal, match=r"prompt 1: 70 tokens.*200 positions"):
        sample_groups(model_of("llama"), PROMPTS, KEYS, SamplingSettings(max_new_tokens=150))
    with pytest.raises(Refusal, match="prompt 0"):
        sample_groups(model_of("llama"), [[]], KEYS[:1], DRAWN)
    with pytest.raises(Refusal, match="top_p"):
        SamplingSettings(top_p=0.0)


def test_which_models_are_decoded_in_groups() -> None:
    """Fails when: `takes_groups` lets a model through that is not on the attention interface."""
    assert {name: takes_groups(model_of(name)) for name in [*CONFIGS, "t5"]} == {
        **dict.fromkeys(CONFIGS, True), "bloom": False, "t5": False
    }  # fmt: skip


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_an_unknown_model_is_decoded_in_groups_if_it_shows_that_it_can_be(precision: str) -> None:
    """A layer that mixes neighbors gives it away, in a run in bfloat16 too, whose weights are float32.

    Fails when: `_groups_are_exact` compares with the groups' own pass, or allows the rounding of the weights' type.
    """
    forget_process_state()
    model = Accelerator(cpu=True, mixed_precision=precision).prepare(model_of("olmo2"))
    model.config.model_type = "newcomer"
    assert takes_groups(model)
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output + output.roll(1, dims=1))
    assert not takes_groups(model)
