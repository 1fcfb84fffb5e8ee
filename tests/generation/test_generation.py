"""Samples against a plain loop of whole forwards, and what they must leave as it was."""

import json
import random

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from toolkit.config import Refusal, SampleConfig
from toolkit.export.model_directory import write_model
from toolkit.generation.samples import sample_prompts, sample_texts, trim_for_display
from toolkit.losses.selective_head import head_comes_last
from toolkit.models.adapter_saving import save_adapter
from toolkit.models.attention.interface import DOCUMENTS, register_attention
from toolkit.models.layers import compile_layers
from toolkit.preference.pair_layouts import choose_answer_layout, choose_pair_layout

LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; puts <s> first."""
    special = ["<pad>", "<s>", "<end>", "<user>", "<assistant>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="<end>", unk_token="<unk>", chat_template=CHAT
    )


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=6 + len(LETTERS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    return model


PROMPTS = [{"prompt": "the cat sat"}, {"prompt": "a"}, {"prompt": "no one knows the", "reference": " way."}]
GREEDY = SampleConfig(sample_temperature=0.0, sample_max_new_tokens=12)
WARM = SampleConfig(sample_temperature=0.9, sample_max_new_tokens=12)


def greedy_loop(model, tokenizer, prompt: str, steps: int) -> str:
    """One whole forward a token, no cache, no padding, one prompt at a time."""
    ids = tokenizer(prompt)["input_ids"]
    start = len(ids)
    for _ in range(steps):
        with torch.no_grad():
            following = int(model.eval()(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(following)
        if following == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def texts(samples: list[dict[str, str]]) -> list[str]:
    return [sample["text"] for sample in samples]


def test_greedy_samples_are_those_of_one_whole_forward_a_token(model, tokenizer, accelerator):
    """Fails when: <s> is left out of the prompts."""
    expected = [greedy_loop(model, tokenizer, prompt["prompt"], 12) for prompt in PROMPTS]
    samples = sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY)
    assert texts(samples) == expected
    assert [sample["prompt"] for sample in samples] == [prompt["prompt"] for prompt in PROMPTS]
    assert [sample.get("reference") for sample in samples] == [None, None, " way."]


def test_plain_texts_are_prompts_and_rows_alone_are_no_splits(model, tokenizer, accelerator):
    """Fails when: a text is asked for its "prompt", or no prompts are made of what isn't splits, without a word."""
    plain = [prompt["prompt"] for prompt in PROMPTS]
    assert texts(sample_texts(accelerator, model, tokenizer, plain, GREEDY)) == texts(
        sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY)
    )
    with pytest.raises(Refusal, match=r"Dataset\.from_list") as refused:
        sample_prompts({"train": plain}, tokenizer, GREEDY)
    assert "dict of list" in str(refused.value)


@pytest.mark.parametrize("whose", ["tokenizer", "model"])
def test_sample_stops_at_the_end_token_of_the_tokenizer_and_of_the_model(whose, model, tokenizer, accelerator):
    """Fails when: either of the two is left out of the stops: the text would continue after the letter that ends it here."""
    free = texts(sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY))
    letter = free[0][4]
    if whose == "tokenizer":
        tokenizer.eos_token = letter
    else:
        model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(letter)]
    stopped = texts(sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY))
    assert [text.removesuffix(letter) for text in stopped] == [text.partition(letter)[0] for text in free]


def test_sampling_repeats_itself_and_leaves_every_random_state_alone(model, tokenizer, accelerator):
    """Fails when: the seed of the keys is drawn."""
    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = texts(sample_texts(accelerator, model, tokenizer, PROMPTS, WARM))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])
    torch.manual_seed(6)
    assert texts(sample_texts(accelerator, model, tokenizer, PROMPTS, WARM)) == first
    assert first != texts(sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY))


def test_seed_of_the_run_changes_the_samples(model, tokenizer, accelerator):
    """Fails when: the keys leave the seed out."""
    from dataclasses import dataclass

    from toolkit.config import RunConfig

    @dataclass(frozen=True)
    class Config(SampleConfig, RunConfig):
        sample_max_new_tokens: int = 12

    by_seed = {tuple(texts(sample_texts(accelerator, model, tokenizer, PROMPTS, Config(seed=seed)))) for seed in (1, 2)}
    assert len(by_seed) == 2


def test_text_of_a_prompt_does_not_hang_on_those_after_it(model, tokenizer, accelerator):
    """Fails when: keys follow the number of prompts."""
    alone = texts(sample_texts(accelerator, model, tokenizer, PROMPTS[:1], WARM))
    assert texts(sample_texts(accelerator, model, tokenizer, PROMPTS, WARM))[:1] == alone


def test_model_is_left_as_it_was_found(model, tokenizer, accelerator):
    """Fails when: modes are restored with model.train()."""
    model.train()
    model.model.layers[0].eval()
    model.gradient_checkpointing_enable()
    model.generation_config.repetition_penalty = 1.3
    modes = {name: module.training for name, module in model.named_modules()}
    settings = model.generation_config
    sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert model.generation_config is settings


def test_an_adapters_base_is_left_as_it_was_found_and_saved_with_its_ends(model, tokenizer, accelerator, tmp_path):
    """Fails when: the attention of groups is set on peft's model, and not on the base."""
    from peft import LoraConfig, get_peft_model

    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 7]
    settings, written = model.generation_config, []
    expected = texts(sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY))  # an adapter that has learned nothing adds nothing
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for directory in (tmp_path / "before", tmp_path / "after"):
        state = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
        save_adapter(adapted, directory, state)
        written.append(json.loads((directory / "base" / "generation_config.json").read_text()))
        assert texts(sample_texts(accelerator, adapted, tokenizer, PROMPTS, GREEDY)) == expected
    assert written[0]["eos_token_id"] == [tokenizer.eos_token_id, 7]
    assert written[1] == written[0]
    assert adapted.generation_config is model.generation_config is settings


def test_a_model_saved_between_two_samples_is_sampled_alike(model, tokenizer, accelerator, tmp_path):
    """Fails when: the ends of turns that are written for `generate` replace the model's own ends for the rest of the run."""
    letter = texts(sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY))[0][4]
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(letter)]
    before = texts(sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_model(tmp_path / "model", model, state, tokenizer, "", "float32")
    assert json.loads((tmp_path / "model/generation_config.json").read_text())["eos_token_id"] == [tokenizer.eos_token_id]
    assert texts(sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY)) == before


def test_a_model_is_written_without_looking_for_wrappers_around_it(model, tokenizer, tmp_path, monkeypatch):
    """That imports DeepSpeed. Fails when: `write_model` saves outside of `saved_as_they_are`, or what that replaces has moved."""
    from transformers import modeling_utils

    looked_at = []
    monkeypatch.setattr(modeling_utils, "extract_model_from_parallel", lambda each, **_: looked_at.append(each) or each)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_model(tmp_path / "model", model, state, tokenizer, "", "float32")
    assert not looked_at
    model.save_pretrained(tmp_path / "without")
    assert looked_at


def test_wrapping_checkpointing_and_the_models_own_decoding_settings_change_no_text(model, tokenizer, accelerator):
    """Fails when: the wrapped model is called, or the model's repetition penalty gets through."""
    expected = texts(sample_texts(accelerator, model, tokenizer, PROMPTS, WARM))
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.top_k = 1
    model.train()
    wrapped = torch.nn.DataParallel(accelerator.prepare(model))
    assert texts(sample_texts(accelerator, wrapped, tokenizer, PROMPTS, WARM)) == expected


def test_long_prompt_keeps_its_end_and_leaves_room_for_the_sample(model, tokenizer, accelerator):
    """Fails when: the prompt is cut at its end: the last 52 of 64 positions are the prompt's, 12 the sample's."""
    long = "ab cd ef. " * 20
    ids = tokenizer(long, add_special_tokens=False)["input_ids"][-52:]
    sequence = list(ids)
    for _ in range(12):
        with torch.no_grad():
            sequence.append(int(model.eval()(input_ids=torch.tensor([sequence])).logits[0, -1].argmax()))
    expected = tokenizer.decode(sequence[52:], skip_special_tokens=True)
    assert texts(sample_texts(accelerator, model, tokenizer, [{"prompt": long}], GREEDY)) == [expected]


@pytest.mark.parametrize("recomputed", [False, True], ids=["compiled", "compiled and recomputed"])
def test_compiled_layers_are_not_compiled_again_for_each_length(recomputed, model, tokenizer, accelerator):
    """Fails when: the stance is left at its default, or layers that are recomputed too are not known as compiled ones."""
    expected = texts(sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY))
    compilations = []

    def count(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile_layers(model, recomputed, backend=count)
    assert texts(sample_texts(accelerator, model, tokenizer, PROMPTS, GREEDY)) == expected
    assert head_comes_last(model, model, torch.tensor([[1, 2, 3]]))
    model.config.model_type = "newcomer"  # so that its layout is found by trying
    model.config._attn_implementation = DOCUMENTS
    register_attention()
    assert choose_answer_layout(model) == "packed"
    assert choose_pair_layout(model, "auto") == "shared"
    assert not compilations
    model(input_ids=torch.tensor([[1, 2, 3, 4]]))
    assert compilations  # otherwise they are


CONFIG = SampleConfig(num_samples=3, sample_max_new_tokens=5)


def held_out(rows: list[dict]) -> DatasetDict:
    return DatasetDict({"train": Dataset.from_list([{"text": "train only"}]), "validation": Dataset.from_list(rows)})


def test_prompts_are_spread_over_the_held_out_split_with_what_follows_them(tokenizer):
    """Fails when: the first rows are taken, or the training split."""
    rows = [{"prompt": f"question {letter}", "completion": f" answer {letter}"} for letter in LETTERS[:10]]
    prompts = sample_prompts(held_out(rows), tokenizer, CONFIG)
    assert [prompt["prompt"] for prompt in prompts] == ["question b", "question f", "question i"]
    assert [prompt["reference"] for prompt in prompts] == [" answ"] * 3
    assert len(sample_prompts(held_out(rows[:2]), tokenizer, CONFIG)) == 2
    assert sample_prompts(held_out(rows), tokenizer, SampleConfig(num_samples=0)) == []


def test_chat_prompt_is_everything_before_the_last_answer(tokenizer):
    """Fails when: the first assistant turn ends the prompt."""
    messages = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why"}, {"role": "assistant", "content": "so"},
    ]
    expected = [{"prompt": "<user>hi<end><assistant>yes<end><user>why<end><assistant>", "reference": "so"}]
    assert sample_prompts(held_out([{"messages": messages}]), tokenizer, CONFIG) == expected
    pair = {"prompt": messages[:3], "completion": messages[3:]}
    assert sample_prompts(held_out([pair]), tokenizer, CONFIG) == expected
    preference = {"prompt": messages[:3], "chosen": messages[3:], "rejected": messages[1:2]}
    assert sample_prompts(held_out([preference]), tokenizer, CONFIG) == expected
    assert sample_prompts(held_out([{"chosen": messages, "rejected": messages[:2]}]), tokenizer, CONFIG) == expected
    answer = {"prompt": "hi", "chosen": messages[3:], "rejected": messages[1:2]}
    assert sample_prompts(held_out([answer]), tokenizer, CONFIG) == [{"prompt": "<user>hi<end><assistant>", "reference": "so"}]


@pytest.mark.parametrize("text", ["one two three four five six", "x", "abc" * 300, "a line\nanother\n" * 30, " \n lead"])
def test_beginning_of_a_text_and_its_reference_are_the_text(text, tokenizer):
    """Fails when: the space at the cut is lost or ends the prompt."""
    config = SampleConfig(sample_max_new_tokens=10_000)
    (prompt,) = sample_prompts(held_out([{"text": text}]), tokenizer, config)
    assert text.startswith(prompt["prompt"] + prompt["reference"].rstrip("…"))
    assert 0 < len(prompt["prompt"]) <= 200
    assert prompt["prompt"] == prompt["prompt"].rstrip() or not prompt["prompt"].strip()


def test_streams_give_their_first_rows_and_rows_without_words_give_none(tokenizer):
    """Fails when: the first row of a stream is left out."""
    def rows():
        for letter in LETTERS:
            yield {"text": f"text {letter} and more"}

    stream = {"validation": IterableDataset.from_generator(rows)}
    assert [prompt["prompt"][:6] for prompt in sample_prompts(stream, tokenizer, CONFIG)] == ["text a", "text b", "text c"]
    assert sample_prompts(held_out([{"text": "  "}, {"text": ""}]), tokenizer, CONFIG) == []
    assert sample_prompts(held_out([{"text": "long enough", "label": 1}]), tokenizer, CONFIG)
    assert sample_prompts(held_out([{"tokens": ["a"], "tags": [0]}]), tokenizer, CONFIG) == []


def test_trimmed_text_keeps_the_end_that_matters():
    """Fails when: the start is kept where the end was asked for."""
    assert trim_for_display("abcdef", 4) == "abc…"
    assert trim_for_display("abcdef", 4, keep="end") == "…def"
    assert trim_for_display("abcd", 4) == "abcd"
