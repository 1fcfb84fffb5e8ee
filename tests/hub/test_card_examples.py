"""The examples of model cards, run as they are: what they print is what the model that was saved says."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from card_rules import problems_of_card
from datasets import Dataset, DatasetDict
from huggingface_hub import ModelCard

import toolkit as tk
from toolkit.cli.merge import merge
from toolkit.data.tokenize.masks import turn_end_ids
from toolkit.data.tokenize.tasks import tokenize_for_preference
from toolkit.export.card import model_card
from toolkit.export.card_examples import KINDS as KINDS_OF_CARDS, Traits, kind_of
from toolkit.losses.reward import answer_rewards
from toolkit.models.sentence_files import EmbeddingStyle
from toolkit.models.trained import auto_class_of
from toolkit.runs.summary import Summary


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.OutputConfig):
    lora_r: int = 2


SHAPE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
NAMES: dict[str, Any] = {"id2label": {0: "cat", 1: "dog", 2: "cow"}, "label2id": {"cat": 0, "dog": 1, "cow": 2}}
CLASSES, BASES = "SequenceClassification", {"bert": "MaskedLM", "llama": "CausalLM", "t5": "Seq2SeqLM"}
TEXTS = {'"...", "..."\ninputs': '"a dog", "a cat and a dog and a cat"\ninputs', '["...", "..."]\ninputs': '["a cat", "a dog"]\ninputs'}
PROMPTS = ("search: ", "found: ")
# Kind: the shape, the class, the settings of the run, fields of the head, and the Hub's task.
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], str | None]] = {
    "chat": ("llama", "CausalLM", {}, {}, "text-generation"),
    "text": ("llama", "CausalLM", {}, {}, "text-generation"),
    "mask": ("bert", "MaskedLM", {}, {}, "fill-mask"),
    "answer": ("bert", "QuestionAnswering", {"max_answer_length": 2}, {"num_labels": 2}, "question-answering"),
    "target": ("t5", "Seq2SeqLM", {"source_prefix": 'say "é🙂": ', "max_target_length": 7}, {}, None),
    "translation": ("t5", "Seq2SeqLM", {"source_lang": "en", "target_lang": "de"}, {}, "translation"),
    "single_label": ("bert", CLASSES, {"problem_type": "single_label"}, NAMES, "text-classification"),
    "multi_label": ("bert", CLASSES, {"problem_type": "multi_label"}, NAMES, "text-classification"),
    "regression": ("bert", CLASSES, {"problem_type": "regression"}, {"num_labels": 1}, "text-classification"),
    "ranking": ("bert", CLASSES, {"ranking_loss": "bce"}, {"num_labels": 1}, "text-ranking"),
    "chat_reward": ("llama", CLASSES, {"center_rewards_coefficient": None}, {"num_labels": 1}, "text-classification"),
    "text_reward": ("llama", CLASSES, {"center_rewards_coefficient": None}, {"num_labels": 1}, "text-classification"),
    "tags": ("bert", "TokenClassification", {}, NAMES, "token-classification"),
    "choice": ("bert", "MultipleChoice", {}, {}, "multiple-choice"),
}  # fmt: skip


def saved(kind: str, adapter: str | None, files: Any = None) -> tuple[Any, Any, Path, str]:
    """A model of random weights, its tokenizer, its directory under the working directory and the text of its card."""
    shape, auto, settings, head, _ = KINDS.get(kind, ("bert", "", {"embedding_loss": "infonce"}, {}, None))
    tokenizer = tk.train_tokenizer(["a cat and a dog"] * 9, 280, encoder=shape == "bert")
    tokenizer.chat_template = None if kind in ("text", "text_reward") else tokenizer.chat_template
    torch.manual_seed(0)
    config = Config(model=f"tiny-{shape}", max_length=64, output_dir="run", use_peft=adapter is not None, **SHAPE)
    if adapter == "elsewhere":
        base = tk.load_model(f"AutoModelFor{BASES[shape]}", config, tokenizer)
        directory = tk.save_model(None, base, tokenizer, "base")
        for name in ("config.json", "generation_config.json"):  # of a model that pads with its end, and ends no turn
            if (directory / name).exists():
                written = json.loads((directory / name).read_text()) | {"pad_token_id": tokenizer.eos_token_id}
                (directory / name).write_text(json.dumps(written | {"eos_token_id": tokenizer.eos_token_id}))
        config = Config(model=str(directory.resolve()), max_length=64, output_dir="run", use_peft=True)
    model: Any = tk.load_model(f"AutoModelFor{auto}", config, tokenizer, **head) if auto else tk.load_encoder(config, tokenizer)
    if kind == "translation":
        model.generation_config.forced_bos_token_id = 7  # as of a target language
    model = tk.add_adapter(model, config, tokenizer)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    directory = tk.save_model(None, model, tokenizer, "run", Summary({}, settings), files=files(model) if files else None)
    return model.eval(), tokenizer, directory, (directory / "README.md").read_text()


def said(kind: str, model: Any, tokenizer: Any) -> str:
    """What the example must print, by the model as it was before it was saved."""
    if kind in ("chat", "text", "target", "translation"):
        return _written(kind, model, tokenizer)
    if kind == "mask":
        ids = tokenizer(f"... {tokenizer.mask_token} ...")["input_ids"]
        return str(tokenizer.decode(_logits(model, ids)[ids.index(tokenizer.mask_token_id)].argmax()))
    if kind == "answer":
        row = {"question": "a dog", "context": "a cat and a dog and a cat"}
        return tk.answer_questions(model, tokenizer, [row], max_length=64, doc_stride=8, max_answer_length=2)[0][0].text
    if kind == "choice":
        pairs = [tokenizer("...", text)["input_ids"] for text in ("a cat", "a dog")]
        kinds = [tokenizer("...", text)["token_type_ids"] for text in ("a cat", "a dog")]
        scores = [_logits(model, [ids], token_type_ids=torch.tensor([[types]])).item() for ids, types in zip(pairs, kinds, strict=True)]
        return "a cat" if scores[0] > scores[1] else "a dog"
    if kind == "tags":
        words = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in ("a cat", "a dog")]
        tags = _logits(model, [tokenizer.cls_token_id, *words[0], *words[1], tokenizer.sep_token_id]).argmax(-1).tolist()
        return str([NAMES["id2label"][tags[place]] for place in (1, 1 + len(words[0]))])
    if kind.endswith("reward"):
        return _reward(kind, model, tokenizer)
    inputs = tokenizer("...", "...", return_tensors="pt") if kind == "ranking" else tokenizer("...", return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    if kind == "multi_label":
        return str([NAMES["id2label"][n] for n in range(3) if logits[n] > 0])
    return str(NAMES["id2label"][int(logits.argmax())]) if kind == "single_label" else str(logits.item())


def _logits(model: Any, ids: Any, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), **more).logits[0]


def _written(kind: str, model: Any, tokenizer: Any) -> str:
    """The most probable token at each position, up to the end of a turn or a text."""
    settings, ids, first = KINDS[kind][2], [], 0
    if kind in ("target", "translation"):
        source = torch.tensor([tokenizer(settings.get("source_prefix", "") + "...")["input_ids"]])
        ids = [0 if model.config.decoder_start_token_id is None else model.config.decoder_start_token_id]
    else:
        chat = [{"role": "user", "content": "..."}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) if kind == "chat" else "..."
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        first = len(ids) if kind == "chat" else 0
    for place in range(settings.get("max_target_length", 100)):
        with torch.no_grad():
            inputs = {"input_ids": source, "decoder_input_ids": torch.tensor([ids])} if KINDS[kind][0] == "t5" else {"input_ids": torch.tensor([ids])}
            ids.append(7 if kind == "translation" and place == 0 else int(model(**inputs).logits[0, -1].argmax()))
        if ids[-1] in turn_end_ids(tokenizer):
            break
    return str(tokenizer.decode(ids[first:], skip_special_tokens=True))


def _reward(kind: str, model: Any, tokenizer: Any) -> str:
    """Of the tokens that recipes/reward.py trains on."""
    asked, answers = {"role": "user", "content": "..."}, [{"role": "assistant", "content": text} for text in ("...", "a cat")]
    row: dict[str, Any] = {"prompt": [asked], "chosen": answers[:1], "rejected": answers[1:]}
    if kind == "text_reward":
        row = {"prompt": ".", "chosen": "..", "rejected": "a cat"}
    rows = DatasetDict(train=Dataset.from_list([row | {"origin": "rows.jsonl:1"}]))
    tokenized = tokenize_for_preference(rows, tokenizer, Config(max_length=64))["train"][0]
    ids = torch.tensor([tokenized["input_ids"][: tokenized["prompt_tokens"] + tokenized["chosen_tokens"]]])
    with torch.no_grad():
        return str(answer_rewards(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).item())


def run(card: str) -> dict[str, Any]:
    """The example's names after it ran, with words in the place of three points where one of several is to be chosen."""
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    for old, new in TEXTS.items():
        code = code.replace(old, new)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.parametrize(
    ("kind", "adapter"), [*((kind, adapter) for kind in KINDS for adapter in (None, "elsewhere")), ("answer", "inside"), ("mask", "inside")]
)
def test_the_example_prints_what_the_model_says(
    kind: str, adapter: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an adapter too, whose base has another head, another end and another pad token. Fails when: the lines of one kind
    are another's; the source has no prefix; a chat is tokenized as it wasn't in training; labels, ends or the target's language are the base's;
    an adapter's token types are left out."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer, _, card = saved(kind, adapter)
    assert problems_of_card(card) == []
    assert ModelCard(card).data.pipeline_tag == KINDS[kind][4]
    capsys.readouterr()
    names = run(card)
    printed, expected = capsys.readouterr().out.removesuffix("\n"), said(kind, model, tokenizer)
    if kind == "target":
        assert names["inputs"]["input_ids"].tolist() == [tokenizer(KINDS[kind][2]["source_prefix"] + "...")["input_ids"]]
    if kind == "answer":  # to the last digit, which token types change
        with torch.no_grad():
            torch.testing.assert_close(names["outputs"].start_logits, model(**names["inputs"]).start_logits, rtol=0, atol=1e-6)
    if re.fullmatch(r"-?[\d.e-]+", expected) and kind not in ("text", "chat"):
        assert float(printed) == pytest.approx(float(expected), abs=1e-5)
    else:
        assert printed == expected


@pytest.mark.parametrize("adapter", [None, "elsewhere", "inside"])
def test_the_example_embeds_as_the_model_does(adapter: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By sentence-transformers, which opens no adapter with its base inside: that is merged first. Fails when: a prompt or the pooling is
    another, or the class is one of transformers or peft."""
    pytest.importorskip("sentence_transformers")
    monkeypatch.chdir(tmp_path)
    model, tokenizer, directory, card = saved("embedding", adapter, lambda model: tk.sentence_files(model, EmbeddingStyle("cls", *PROMPTS), 24))
    assert problems_of_card(card) == []
    assert (ModelCard(card).data.library_name, ModelCard(card).data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    in_shell = re.findall(r"```bash\n(.*?)```", card, re.DOTALL)
    assert in_shell == (['name=run/model\ntoolkit merge "$name" --into merged\n'] if adapter == "inside" else [])
    if in_shell:
        merge(directory, Path("merged"))
    names = run(card)
    for found, prompt, texts in ((names["queries"], PROMPTS[0], ["..."]), (names["documents"], PROMPTS[1], ["...", "..."])):
        for vector, text in zip(torch.as_tensor(found), texts, strict=True):
            with torch.no_grad():
                wanted = model(**tokenizer(prompt + text, return_tensors="pt")).last_hidden_state[0, 0]
            torch.testing.assert_close(vector, torch.nn.functional.normalize(wanted, dim=-1), rtol=0, atol=1e-5)


def test_a_model_that_sentence_transformers_does_not_open_is_loaded_as_a_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a pooling of one's own. Fails when: the settings decide, not the files."""
    monkeypatch.chdir(tmp_path)
    *_, card = saved("embedding", None)
    assert type(run(card)["model"]).__name__ == "BertModel"
    assert ModelCard(card).data.library_name == "transformers"


@pytest.mark.parametrize(
    ("head", "kind"),
    [({**NAMES, "problem_type": "multi_label_classification"}, "multi_label"), ({**NAMES}, "single_label"),
     ({"num_labels": 1, "problem_type": "regression"}, "regression")],
)  # fmt: skip
def test_a_teacher_is_a_classifier_without_a_run(head: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """As recipes/distill_classifier.py trains one where none is named. Fails when: what no settings say is a reward model."""
    tokenizer = tk.train_tokenizer(["a cat and a dog"] * 9, 280, encoder=True)
    model: Any = tk.load_model("AutoModelForSequenceClassification", Config(model="tiny-bert", max_length=64, **SHAPE), tokenizer, **head)
    card = (tk.save_model(None, model, tokenizer, tmp_path) / "README.md").read_text()
    assert KINDS_OF_CARDS[kind].lines in card


@pytest.mark.parametrize(
    ("architecture", "auto"),
    [("MarianMTModel", "AutoModelForSeq2SeqLM"), ("GPT2LMHeadModel", "AutoModelForCausalLM"), ("BertModel", "AutoModel"),
     ("BartForConditionalGeneration", "AutoModelForSeq2SeqLM"), ("Gemma3ForConditionalGeneration", "AutoModelForCausalLM"),
     ("Odd", "AutoModel")],
)  # fmt: skip
def test_the_class_is_that_of_the_architecture(architecture: str, auto: str, tmp_path: Path) -> None:
    """In the card and for the commands. Fails when: what a MarianMTModel ends with is looked for behind `Model`, or Gemma 3 is an
    encoder-decoder by its name."""
    assert f"model = {auto}.from_pretrained(name)" in model_card({}, {}, "run", architecture)
    if architecture != "Odd":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "marian", "architectures": [architecture]}))
        assert auto_class_of(tk.ModelConfig(model=str(tmp_path))) == auto


def test_an_adapter_of_a_language_model_ends_with_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which its base may not know as an end. Fails when: the ends are left out, or given where the model directory has them."""
    monkeypatch.chdir(tmp_path)
    _, tokenizer, _, card = saved("chat", "elsewhere")
    assert f"eos_token_id={turn_end_ids(tokenizer)})" in card
    *_, card = saved("chat", None)
    assert "eos_token_id" not in card


def test_a_merged_adapter_is_shown_as_what_it_became(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: toolkit merge says nothing of the chat template or the labels."""
    monkeypatch.chdir(tmp_path)
    for kind in ("chat", "single_label"):
        *_, directory, _ = saved(kind, "elsewhere")
        merge(directory, Path(f"merged-{kind}"))
        assert KINDS_OF_CARDS[kind].lines.split("TOKENS")[0] in Path(f"merged-{kind}/README.md").read_text()


def test_a_pretrained_model_continues_texts_whatever_its_tokenizer_knows() -> None:
    """Fails when: it is shown as a chat."""
    chats = Traits(chats=True)
    assert kind_of("AutoModelForCausalLM", {"packing_strategy": "bfd"}, chats) == "chat"
    assert kind_of("AutoModelForCausalLM", {"packing_strategy": "wrapped"}, chats) == "AutoModelForCausalLM"
