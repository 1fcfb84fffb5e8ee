"""What both sides of `benchmarks/tasks.py` get: a model with random weights and its head, a tokenizer, rows of random words.

Encoders have the shape of MiniLM-L6 (6 layers, 384 wide, 30,522 tokens), that of documents is a ModernBERT of the same width
with eight layers; the encoder-decoder has the shape of a T5 1.1 with four layers a side. A word is a token. Lengths are
lognormal, with the median and the longest that each function names.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
VOCABULARY = {"bert": 30_522, "modernbert": 30_522, "t5": 32_128}
TAGS = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
SPREAD = 0.6  # of the logarithms of lengths


def write_inputs(task: str, folder: Path, examples: int) -> None:
    """`model` with its tokenizer, `check` (the same without dropout) and `train.jsonl`."""
    import torch
    import transformers

    torch.manual_seed(0)
    architecture, head, settings = _MODELS[task]
    model_config = _CONFIGS[architecture](**settings)
    model = getattr(transformers, head)(model_config)
    tokenizer = _tokenizer(architecture)
    for name in ("model", "check"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    _drop_nothing(folder / "check" / "config.json")
    rows = _ROWS[task](examples, np.random.default_rng(0))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _drop_nothing(path: Path) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    rates = {name: 0.0 for name in settings if "dropout" in name and isinstance(settings[name], float)}
    path.write_text(json.dumps({**settings, **rates}), encoding="utf-8")


def _bert(**settings: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCABULARY["bert"], hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
        pad_token_id=SPECIAL.index("[PAD]"), **settings,
    )  # fmt: skip


def _modernbert(**settings: Any) -> Any:
    from transformers import ModernBertConfig

    special = {f"{name}_token_id": SPECIAL.index(f"[{name.upper()}]") for name in ("pad", "cls", "sep")}
    return ModernBertConfig(
        vocab_size=VOCABULARY["modernbert"], hidden_size=384, num_hidden_layers=8, num_attention_heads=6, intermediate_size=576,
        max_position_embeddings=512, bos_token_id=special["cls_token_id"], eos_token_id=special["sep_token_id"], **special,
        **settings,
    )  # fmt: skip


def _t5(**settings: Any) -> Any:
    from transformers import T5Config

    return T5Config(
        vocab_size=VOCABULARY["t5"], d_model=384, d_kv=64, d_ff=1024, num_layers=4, num_heads=6, pad_token_id=0,
        eos_token_id=SPECIAL.index("[SEP]"), feed_forward_proj="gated-gelu", decoder_start_token_id=0, **settings,
    )  # fmt: skip


def _tokenizer(architecture: str) -> Any:
    """Words to ids, with the special tokens of BERT, or with an end alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = dict.fromkeys([*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCABULARY[architecture]))])
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ids = [(name, SPECIAL.index(name)) for name in ("[CLS]", "[SEP]")]
    if architecture in ("bert", "modernbert"):
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
        made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, ids)
        named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
        inputs = ["input_ids", *(["token_type_ids"] if architecture == "bert" else []), "attention_mask"]
    else:
        made.post_processor = processors.TemplateProcessing("$A [SEP]", None, ids)
        named, inputs = {"eos_token": "[SEP]"}, ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=512, model_input_names=inputs, **named
    )


def _lengths(count: int, median: int, longest: int, numbers: np.random.Generator) -> list[int]:
    drawn = np.exp(numbers.normal(np.log(median), SPREAD, size=count))
    return np.clip(drawn.round(), 3, longest).astype(int).tolist()


def _texts(count: int, median: int, longest: int, numbers: np.random.Generator) -> list[list[str]]:
    return [
        [f"w{i}" for i in numbers.integers(len(SPECIAL), VOCABULARY["bert"], size=length)]
        for length in _lengths(count, median, longest, numbers)
    ]


def _tagged_sentences(count: int, numbers: np.random.Generator) -> list[Row]:
    """Sentences of 20 words, as in news."""
    return [{"tokens": words, "tags": (TAGS * len(words))[: len(words)]} for words in _texts(count, 20, 120, numbers)]


def _sentences_of_classes(count: int, numbers: np.random.Generator) -> list[Row]:
    """Sentences of 20 words."""
    return [{"text": " ".join(words), "label": i % 4} for i, words in enumerate(_texts(count, 20, 120, numbers))]


def _documents_of_classes(count: int, numbers: np.random.Generator) -> list[Row]:
    """Texts of 120 words."""
    return [{"text": " ".join(words), "label": i % 4} for i, words in enumerate(_texts(count, 120, 500, numbers))]


def _questions(count: int, numbers: np.random.Generator) -> list[Row]:
    """Questions of 11 words on paragraphs of 120 as in SQuAD; some take several windows."""
    rows = []
    for question, words in zip(_texts(count, 11, 30, numbers), _texts(count, 120, 480, numbers), strict=True):
        at = int(numbers.integers(len(words) - 2))
        answer = {"text": [" ".join(words[at : at + 2])], "answer_start": [len(" ".join([*words[:at], ""]))]}
        rows.append({"id": str(len(rows)), "question": " ".join(question), "context": " ".join(words), "answers": answer})
    return rows


def _sources_and_targets(count: int, numbers: np.random.Generator) -> list[Row]:
    """Sources of 120 words, targets of 20."""
    both = zip(_texts(count, 120, 250, numbers), _texts(count, 20, 60, numbers), strict=True)
    return [{"source": " ".join(source), "target": " ".join(target)} for source, target in both]


def _documents(count: int, numbers: np.random.Generator) -> list[Row]:
    """Texts of 90 words."""
    return [{"text": " ".join(words)} for words in _texts(count, 90, 250, numbers)]


def _pairs(count: int, numbers: np.random.Generator) -> list[Row]:
    """Questions of 10 words, answers of 45."""
    both = zip(_texts(count, 10, 30, numbers), _texts(count, 45, 120, numbers), strict=True)
    return [{"anchor": " ".join(anchor), "positive": " ".join(positive)} for anchor, positive in both]


def _lists(count: int, numbers: np.random.Generator) -> list[Row]:
    """Queries of 8 words, each with eight documents of 45, one of them relevant."""
    documents = iter(_texts(8 * count, 45, 110, numbers))
    return [
        {
            "query": " ".join(query), "documents": [" ".join(next(documents)) for _ in range(8)],
            "labels": numbers.permutation([1, *[0] * 7]).tolist(),
        }
        for query in _texts(count, 8, 14, numbers)
    ]  # fmt: skip


def _questions_with_choices(count: int, numbers: np.random.Generator) -> list[Row]:
    """Contexts of 15 words and the first 4 of a sentence with four endings of 10, as in SWAG."""
    endings = iter(_texts(4 * count, 10, 40, numbers))
    both = zip(_texts(count, 15, 60, numbers), _texts(count, 4, 12, numbers), strict=True)
    return [
        {
            "sent1": " ".join(context), "sent2": " ".join(begun),
            **{f"ending{i}": " ".join(next(endings)) for i in range(4)}, "label": int(numbers.integers(4)),
        }
        for context, begun in both
    ]  # fmt: skip


_CONFIGS: dict[str, Callable[..., Any]] = {"bert": _bert, "modernbert": _modernbert, "t5": _t5}
_LABELS = {"id2label": dict(enumerate(TAGS)), "label2id": {tag: i for i, tag in enumerate(TAGS)}}
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "token_classification": ("bert", "BertForTokenClassification", _LABELS),
    "question_answering": ("bert", "BertForQuestionAnswering", {}),
    "seq2seq": ("t5", "T5ForConditionalGeneration", {}),
    "masked_lm": ("bert", "BertForMaskedLM", {}),
    "embedding": ("bert", "BertModel", {}),
    "reranker": ("bert", "BertForSequenceClassification", {"num_labels": 1}),
    "multiple_choice": ("bert", "BertForMultipleChoice", {}),
    "classification": ("bert", "BertForSequenceClassification", {"num_labels": 4}),
    "classification_of_documents": ("modernbert", "ModernBertForSequenceClassification", {"num_labels": 4}),
}
_ROWS: dict[str, Callable[[int, np.random.Generator], list[Row]]] = {
    "token_classification": _tagged_sentences, "question_answering": _questions, "seq2seq": _sources_and_targets,
    "masked_lm": _documents, "embedding": _pairs, "reranker": _lists, "multiple_choice": _questions_with_choices,
    "classification": _sentences_of_classes, "classification_of_documents": _documents_of_classes,
}  # fmt: skip
