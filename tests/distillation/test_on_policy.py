"""On-policy distillation: what the student writes, what of it is trained on, and that neither batch nor rank decides it."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import toolkit as tk
from toolkit.data.loading.loaders import TrainLoader
from toolkit.generation.sampler import sample_groups

IGNORED = -100


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tk.train_tokenizer(["a few words to count"] * 50, 300)


@pytest.fixture(scope="module")
def student(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def loader(micro_batch_size: int = 4, *, packing: bool = False, without_labels: bool = False) -> TrainLoader:
    """Prompts of 3 to 6 tokens with an answer of 5; in every third document two answers with a question between them."""
    rows = []
    for i in range(12):
        tokens = [10 + (i * 13 + j * 7) % 280 for j in range(8 + i % 4)]
        labels = [IGNORED] * (3 + i % 4) + tokens[3 + i % 4 :]
        if i % 3 == 0:
            tokens, labels = [*tokens, 11, 12, 13, 14], [*labels, IGNORED, IGNORED, 13, 14]
        row = {"input_ids": tokens, "labels": labels, "length": len(tokens), "supervised_tokens": sum(label != IGNORED for label in labels)}
        rows.append({name: value for name, value in row.items() if not (without_labels and name == "labels")})
    values = {"per_device_train_batch_size": micro_batch_size, "gradient_accumulation_steps": 4 // micro_batch_size}
    config = tk.DataConfig(max_length=20, num_train_epochs=2, packing=packing, **values)
    train, _ = tk.build_dataloaders({"train": Dataset.from_list(rows)}, tk.collate_packed if packing else tk.collate_padded, config)
    assert isinstance(train, TrainLoader)
    return train




def settings(**changes: Any) -> Any:
    return type("Settings", (), {"on_policy_share": 1.0, "max_new_tokens": 6, "max_length": 20, "seed": 42, **changes})


def texts_of(batch: tk.Batch) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each document, without padding, in any layout."""
    found = []
    for micro_batch in batch.micro_batches:
        if "cu_seq_lens_q" in micro_batch:
            bounds = micro_batch["cu_seq_lens_q"].tolist()
            pieces = [(0, slice(start, end)) for start, end in itertools.pairwise(bounds)]
        else:
            pieces = [(row, slice(0, int(mask.sum()))) for row, mask in enumerate(micro_batch["attention_mask"])]
        found += [(micro_batch["input_ids"][row, piece].tolist(), micro_batch["labels"][row, piece].tolist()) for row, piece in pieces]
    return found


def own(student: Any, tokenizer: Any, train: TrainLoader, batch: tk.Batch, **changes: Any) -> tk.Batch:
    return tk.with_own_answers(Accelerator(cpu=True), student, tokenizer, train, batch, settings(**changes))


@pytest.mark.fast(2)
@pytest.mark.parametrize("packing", [False, True])
def test_the_last_answer_is_what_the_student_writes_behind_all_before_it(student: Any, tokenizer: Any, packing: bool) -> None:
    """Fails when: an earlier answer is supervised, the prompt lacks its last token, or tokens of the data are counted."""
    train = loader(packing=packing)
    for batch in train.batches():
        changed = own(student, tokenizer, train, batch)
        before, after = texts_of(batch), texts_of(changed)
        assert len(before) == len(after)
        for (tokens, labels), (new_tokens, new_labels) in zip(before, after, strict=True):
            start = max(i for i in range(1, len(labels)) if labels[i] != IGNORED and labels[i - 1] == IGNORED)
            assert new_tokens[:start] == tokens[:start]
            assert new_labels == [IGNORED] * start + new_tokens[start:]
            assert 1 <= len(new_tokens) - start <= min(6, 20 - start)
        supervised = sum(label != IGNORED for _, labels in after for label in labels)
        assert changed.totals == {**batch.totals, "tokens": float(supervised)}


def test_it_is_drawn_from_the_students_distribution(student: Any, tokenizer: Any) -> None:
    """The first token of many answers to one prompt. Fails when: the key is not the document's, or the draw is greedy."""
    prompt = [11, 12, 13]
    rows = [{"input_ids": [*prompt, 20, 21], "labels": [IGNORED] * 3 + [20, 21], "length": 5, "supervised_tokens": 2} for _ in range(2000)]
    config = tk.DataConfig(per_device_train_batch_size=2000, num_train_epochs=1)
    train, _ = tk.build_dataloaders({"train": Dataset.from_list(rows)}, tk.collate_padded, config)
    assert isinstance(train, TrainLoader)
    batch = own(student, tokenizer, train, next(iter(train.batches())), max_new_tokens=1)
    drawn = np.bincount(batch.micro_batches[0]["input_ids"][:, 3].numpy(), minlength=300) / 2000
    with torch.no_grad():
        wanted = student(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    assert abs(drawn - wanted).sum() < 2.5 * float(np.sqrt(wanted * (1 - wanted) / 2000).sum())
    greedy = sample_groups(student, [prompt], np.array([[1]], dtype=np.uint64), tk.SamplingSettings(max_new_tokens=1, temperature=0.0))
    assert drawn[greedy[0][0].tokens[0]] < 0.5


@pytest.mark.fast(1)
def test_every_split_of_the_batch_has_the_same_answers_and_a_share_is_a_share(student: Any, tokenizer: Any) -> None:
    """Fails when: a key follows from the place in the micro-batch, or which are drawn does."""
    found, totals = {}, {}
    for size in (1, 4):
        train = loader(size)
        batches = [own(student, tokenizer, train, batch, on_policy_share=0.5) for batch in train.batches()]
        found[size] = [sorted(texts_of(batch)) for batch in batches]
        totals[size] = [batch.totals for batch in batches]
        same = [text for batch in train.batches() for text in texts_of(batch)]
        kept = sum(text in same for batch in batches for text in texts_of(batch))
        assert 4 <= kept <= 20  # of 24
    assert (found[1], totals[1]) == (found[4], totals[4])
    epochs = [text for batch in found[4] for text in batch]
    assert len({tuple(tokens) for tokens, _ in epochs}) > 16  # an epoch's answers are not the next one's


def test_without_a_share_nothing_changes_and_texts_are_refused(student: Any, tokenizer: Any) -> None:
    """Fails when: rows without prompts are trained on as they are, without a word."""
    train = loader()
    batch = next(iter(train.batches()))
    assert own(student, tokenizer, train, batch, on_policy_share=0.0) is batch
    texts = loader(without_labels=True)
    with pytest.raises(tk.Refusal, match="--on-policy-share: "):
        own(student, tokenizer, texts, next(iter(texts.batches())))
