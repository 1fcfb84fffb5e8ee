"""How a model is used, as the Python of its card: for each kind of model the Hub's task and the lines that predict."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Traits:
    """What an example depends on next to the settings: of the model, its tokenizer and the files next to them."""

    labels: Mapping[Any, str] = field(default_factory=dict)  # of the head, by number
    problem_type: str = ""  # as the model's config has it
    chats: bool = False  # the tokenizer has a chat template
    ends: Sequence[int] = ()  # tokens that end what a language model writes
    embeds: bool = False  # the directory is one of sentence-transformers


class Kind(NamedTuple):
    task: tuple[str, str] | None  # the Hub's tag (huggingface.js, packages/tasks/src/pipelines.ts) and its name
    lines: str


_GENERATION, _CLASSES = ("text-generation", "Text generation"), ("text-classification", "Text classification")
_OF_A_TEXT = 'inputs = tokenizer("...", return_tensors="pt")\n'
_SCORE = "print(model(**inputs).logits.item())"
_GENERATE = "output = model.generate(**inputs, max_new_tokens=TOKENS)\n"
_WRITE = _OF_A_TEXT + _GENERATE + "print(tokenizer.decode(output[0], skip_special_tokens=True))"
# By transformers' class; a name of its own where that is not enough.
KINDS = {
    "AutoModelForCausalLM": Kind(_GENERATION, _WRITE),
    "chat": Kind(_GENERATION, """chat = [{"role": "user", "content": "..."}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
""" + _GENERATE + 'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))'),
    "diffusion": Kind(("text-generation", "Masked diffusion"), ""),
    "AutoModelForMaskedLM": Kind(("fill-mask", "Masked language modeling"),
        """inputs = tokenizer(f"... {tokenizer.mask_token} ...", return_tensors="pt")
hidden = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
print(tokenizer.decode([model(**inputs).logits[0, hidden].argmax().item()]))"""),
    "AutoModelForQuestionAnswering": Kind(("question-answering", "Question answering"), """question, context = "...", "..."
inputs = tokenizer(question, context, return_offsets_mapping=True, return_tensors="pt")
places = inputs.pop("offset_mapping")[0].tolist()
outputs = model(**inputs)
starts, ends = outputs.start_logits[0].tolist(), outputs.end_logits[0].tolist()
tokens = [token for token, text in enumerate(inputs.sequence_ids()) if text == 1]  # of the context
score, start, end = max((starts[i] + ends[j], i, j) for i in tokens for j in tokens if i <= j < i + TOKENS)
print(context[places[start][0] : places[end][1]].strip())"""),
    "AutoModelForSeq2SeqLM": Kind(None, _WRITE),
    "single_label": Kind(_CLASSES, _OF_A_TEXT + "print(model.config.id2label[model(**inputs).logits.argmax().item()])"),
    "multi_label": Kind(_CLASSES, _OF_A_TEXT + """chosen = (model(**inputs).logits[0] > 0).nonzero().flatten().tolist()
print([model.config.id2label[number] for number in chosen])"""),
    "regression": Kind(_CLASSES, _OF_A_TEXT + _SCORE),
    "ranking": Kind(("text-ranking", "Text ranking"),
        'inputs = tokenizer("...", "...", return_tensors="pt")  # a query and a document\n' + _SCORE),
    "text_reward": Kind(_CLASSES, """text = "..."  # a prompt with its answer
if tokenizer.eos_token_id not in (None, tokenizer(text)["input_ids"][-1]):
    text += tokenizer.eos_token
inputs = tokenizer(text, return_tensors="pt")
""" + _SCORE),
    "chat_reward": Kind(_CLASSES, """chat = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]
text = tokenizer.apply_chat_template(chat, tokenize=False).rstrip()
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
""" + _SCORE),
    "AutoModelForTokenClassification": Kind(("token-classification", "Token classification"), """words = ["...", "..."]
inputs = tokenizer(words, is_split_into_words=True, return_tensors="pt")
tags = model(**inputs).logits[0].argmax(-1).tolist()  # of tokens; a word has that of its first one
print([model.config.id2label[tags[inputs.word_ids().index(number)]] for number in range(len(words))])"""),
    "AutoModelForMultipleChoice": Kind(("multiple-choice", "Multiple choice"), """question, choices = "...", ["...", "..."]
inputs = tokenizer([question] * len(choices), choices, padding=True, return_tensors="pt")
scores = model(**{name: values[None] for name, values in inputs.items()}).logits[0]
print(choices[scores.argmax().item()])"""),
    "embedding": Kind(("sentence-similarity", "Sentence similarity"),
        """queries, documents = model.encode_query(["..."]), model.encode_document(["...", "..."])
print(model.similarity(queries, documents))"""),
    "AutoModel": Kind(None, ""),
}  # fmt: skip
_PEFT_HAS = ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "Seq2SeqLM")


def kind_of(auto: str, settings: Mapping[str, Any], traits: Traits) -> str:
    """One of KINDS, of a model of transformers' class `auto`. Without settings, as of a teacher, by its config alone."""
    if traits.embeds or "denoising_steps" in settings:
        return "embedding" if traits.embeds else "diffusion"
    if auto != "AutoModelForSequenceClassification":
        is_pretrained = settings.get("packing_strategy") == "wrapped"  # on texts, by a tokenizer that may know chats already
        return "chat" if auto == "AutoModelForCausalLM" and traits.chats and not is_pretrained else auto
    if "ranking_loss" in settings:
        return "ranking"
    if problem := settings.get("problem_type") if settings else traits.problem_type.removesuffix("_classification"):
        return str(problem)
    return "single_label" if len(traits.labels) > 1 else "chat_reward" if traits.chats else "text_reward"


def example(kind: str, auto: str, name: str, adapter: str | None, settings: Mapping[str, Any], traits: Traits) -> str:
    """The Markdown of "How to use it"; arguments as of `kind_of` and `model_card`."""
    in_shell = f"```bash\nname={shlex.quote(name)}\ntoolkit"
    if kind == "diffusion":  # transformers would write with it from left to right, which it can't
        about = "A masked-diffusion language model: it fills in hidden tokens from both sides, in several passes."
        return f'{about}\n\n{in_shell} generate "$name" --prompt "..."\n```'
    before, named = "", f"name = {json.dumps(name, ensure_ascii=False)}\n"
    imports, load = _loading(auto, adapter, traits)
    if kind == "embedding":
        imports, load = "from sentence_transformers import SentenceTransformer", "model = SentenceTransformer(name)"
        if adapter == "inside":  # in the folder base, where sentence-transformers (6.2) doesn't look
            before, named, load = f'{in_shell} merge "$name" --into merged\n```\n\n', "", load.replace("name", '"merged"')
    most = settings.get("max_target_length") or settings.get("max_answer_length") or 100
    if auto == "AutoModelForCausalLM" and adapter == "elsewhere" and traits.ends:  # its base may have others
        most = f"{most}, eos_token_id={list(traits.ends)}"
    lines = KINDS[kind].lines.replace("TOKENS", str(most))
    if prefix := settings.get("source_prefix"):
        lines = lines.replace('"..."', json.dumps(f"{prefix}...", ensure_ascii=False), 1)
    return f"{before}```python\n{imports}\n\n{named}{load}\n" + (f"\n{lines}\n```" if lines else "```")


def _loading(auto: str, adapter: str | None, traits: Traits) -> tuple[str, str]:
    """The imports, and the lines that load tokenizer and model."""
    task, load, names = auto.removeprefix("AutoModelFor"), "tokenizer = AutoTokenizer.from_pretrained(name)\n", "AutoTokenizer"
    if adapter == "elsewhere":
        peft = f"AutoPeftModelFor{task}" if task in _PEFT_HAS else "AutoPeftModel"
        has_head = traits.labels and task.endswith(("Classification", "Answering"))  # of a size that the base doesn't have
        load += f"model = {peft}.from_pretrained(name" + (f", id2label={dict(traits.labels)})" if has_head else ")")
        if task == "SequenceClassification":
            load += "\nmodel.config.pad_token_id = tokenizer.pad_token_id  # before which a decoder's text ends"
        if task == "Seq2SeqLM":  # with the target's language
            names += ", GenerationConfig"
            load += "\nmodel.get_base_model().generation_config = GenerationConfig.from_pretrained(name)"
    elif adapter:
        peft, names = "PeftModel", f"{auto}, {names}"
        # adapter_kwargs: transformers (5.23) would look for the adapter's base first, which is what is being loaded
        inside = 'subfolder="base", adapter_kwargs={"subfolder": "base"}'
        load += f"base = {auto}.from_pretrained(name, {inside})\nmodel = PeftModel.from_pretrained(base, name)"
    else:
        return f"from transformers import {auto}, {names}", f"{load}model = {auto}.from_pretrained(name)"
    if task == "QuestionAnswering":
        load += "\nmodel = model.base_model  # peft's own class (0.21) leaves token types out"
    return f"from peft import {peft}\nfrom transformers import {names}", load
