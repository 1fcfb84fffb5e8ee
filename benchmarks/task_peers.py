"""The other side of `benchmarks/tasks.py`: what transformers' example scripts and sentence-transformers' documentation do.

Tokenizing and collators are those of run_ner.py, run_qa.py, run_summarization.py, run_mlm.py, run_swag.py and
run_classification.py, which pads to the longest of a batch here; embeddings have
`CachedMultipleNegativesRankingLoss`, rerankers `LambdaLoss`. Whatever is not named here is the library's default.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from task_job import ROWS_A_STEP, Job


def token_classification(job: Job, **flags: Any) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForTokenClassification.from_pretrained(job.model, **_of_model(flags))

    def tokenized(rows: dict[str, list[Any]]) -> dict[str, Any]:
        encoded = tokenizer(rows["tokens"], truncation=True, max_length=job.max_length, is_split_into_words=True)
        encoded["labels"] = [
            [
                -100 if word is None or word == before else model.config.label2id[tags[word]]
                for before, word in zip([None, *encoded.word_ids(i)], encoded.word_ids(i), strict=False)
            ]
            for i, tags in enumerate(rows["tags"])
        ]
        return encoded

    train = _map(job, tokenized)
    _train(job, _trainer("Trainer", job, model, train, DataCollatorForTokenClassification(tokenizer), flags))


def question_answering(job: Job, *, pad_to_max_length: bool = True, **flags: Any) -> None:
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer, DataCollatorWithPadding, default_data_collator

    pad_to_max_length = pad_to_max_length and not job.is_check
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForQuestionAnswering.from_pretrained(job.model, **_of_model(flags))

    def tokenized(rows: dict[str, list[Any]]) -> dict[str, Any]:
        encoded = tokenizer(
            rows["question"], rows["context"], truncation="only_second", max_length=job.max_length, stride=job.doc_stride,
            return_overflowing_tokens=True, return_offsets_mapping=True,
            padding="max_length" if pad_to_max_length else False,
        )  # fmt: skip
        places: dict[str, list[int]] = {"start_positions": [], "end_positions": []}
        of_row = encoded.pop("overflow_to_sample_mapping")
        for window, offsets in enumerate(encoded.pop("offset_mapping")):
            answer = rows["answers"][of_row[window]]
            first, last = answer["answer_start"][0], answer["answer_start"][0] + len(answer["text"][0])
            context = [i for i, part in enumerate(encoded.sequence_ids(window)) if part == 1]
            is_held = offsets[context[0]][0] <= first and offsets[context[-1]][1] >= last
            for name, at, edge in (("start_positions", first, 0), ("end_positions", last, 1)):
                places[name].append(next(i for i in context if offsets[i][edge] == at) if is_held else 0)
        return {**encoded, **places}

    train = _map(job, tokenized)
    collate = default_data_collator if pad_to_max_length else DataCollatorWithPadding(tokenizer)
    _train(job, _trainer("Trainer", job, model, train, collate, flags))


def seq2seq(job: Job, **flags: Any) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(job.model, **_of_model(flags))

    def tokenized(rows: dict[str, list[Any]]) -> dict[str, Any]:
        encoded = tokenizer(rows["source"], max_length=job.max_length, truncation=True)
        targets = tokenizer(text_target=rows["target"], max_length=job.max_target_length, truncation=True)
        return {**encoded, "labels": targets["input_ids"]}

    train = _map(job, tokenized)
    _train(job, _trainer("Seq2SeqTrainer", job, model, train, DataCollatorForSeq2Seq(tokenizer, model=model), flags))


def masked_lm(job: Job, *, line_by_line: bool = False, **flags: Any) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForMaskedLM.from_pretrained(job.model, **_of_model(flags))
    if line_by_line:
        job = replace(job, texts=ROWS_A_STEP["masked_lm"])  # as many tokens as the blocks have

    def tokenized(rows: dict[str, list[Any]]) -> dict[str, Any]:
        if line_by_line or job.is_check:
            return tokenizer(rows["text"], truncation=True, max_length=job.max_length, return_special_tokens_mask=True)
        encoded = tokenizer(rows["text"], return_special_tokens_mask=True)
        joined = {name: [token for row in values for token in row] for name, values in encoded.items()}
        whole = len(joined["input_ids"]) // job.max_length * job.max_length
        return {
            name: [values[at : at + job.max_length] for at in range(0, whole, job.max_length)]
            for name, values in joined.items()
        }  # fmt: skip

    masks = {"mlm_probability": 1.0, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}
    collate = DataCollatorForLanguageModeling(tokenizer, **(masks if job.is_check else {}))
    _train(job, _trainer("Trainer", job, model, _map(job, tokenized), collate, flags))


def embedding(job: Job, *, mini_batch_size: int = 32, **flags: Any) -> None:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    model = SentenceTransformer(job.model, device="cpu", model_kwargs=_of_model(flags))
    model.max_seq_length = job.max_length
    loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=mini_batch_size)
    _train(job, SentenceTransformerTrainer(
        model=model, args=SentenceTransformerTrainingArguments(**_arguments(job, flags)), loss=loss,
        train_dataset=_rows(job).select_columns(["anchor", "positive"]), callbacks=[job.callback()],
    ))  # fmt: skip


def reranker(job: Job, *, mini_batch_size: int | None = None, **flags: Any) -> None:
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments, losses

    model = CrossEncoder(job.model, device="cpu", max_length=job.max_length, model_kwargs=_of_model(flags))
    loss = losses.LambdaLoss(model, mini_batch_size=mini_batch_size)
    _train(job, CrossEncoderTrainer(
        model=model, args=CrossEncoderTrainingArguments(**_arguments(job, flags)), loss=loss,
        train_dataset=_rows(job).select_columns(["query", "documents", "labels"]), callbacks=[job.callback()],
    ))  # fmt: skip


def multiple_choice(job: Job, **flags: Any) -> None:
    from transformers import AutoModelForMultipleChoice, AutoTokenizer, DataCollatorForMultipleChoice

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForMultipleChoice.from_pretrained(job.model, **_of_model(flags))

    def tokenized(rows: dict[str, list[Any]]) -> dict[str, Any]:
        contexts = [context for context in rows["sent1"] for _ in range(4)]
        endings = [f"{begun} {rows[f'ending{i}'][row]}" for row, begun in enumerate(rows["sent2"]) for i in range(4)]
        encoded = tokenizer(contexts, endings, truncation=True, max_length=job.max_length)
        return {name: [values[at : at + 4] for at in range(0, len(values), 4)] for name, values in encoded.items()}

    rows = _rows(job)
    train = rows.map(tokenized, batched=True, remove_columns=[name for name in rows.column_names if name != "label"])
    _train(job, _trainer("Trainer", job, model, train, DataCollatorForMultipleChoice(tokenizer), flags))


def classification(job: Job, **flags: Any) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForSequenceClassification.from_pretrained(job.model, **_of_model(flags))

    def tokenized(rows: dict[str, list[Any]]) -> dict[str, Any]:
        return {**tokenizer(rows["text"], truncation=True, max_length=job.max_length), "labels": rows["label"]}

    _train(job, _trainer("Trainer", job, model, _map(job, tokenized), DataCollatorWithPadding(tokenizer), flags))


PEERS: dict[str, Callable[..., None]] = {
    "token_classification": token_classification, "question_answering": question_answering, "seq2seq": seq2seq,
    "masked_lm": masked_lm, "embedding": embedding, "reranker": reranker, "multiple_choice": multiple_choice,
    "classification": classification, "classification_of_documents": classification,
}  # fmt: skip


def _of_model(flags: dict[str, Any]) -> dict[str, Any]:
    """The model's own among the flags, taken out of them."""
    return {"dtype": "float32", **{name: flags.pop(name) for name in ("attn_implementation",) if name in flags}}


def _rows(job: Job) -> Any:
    from datasets import load_dataset

    return load_dataset("json", data_files=str(job.rows), split="train")


def _map(job: Job, tokenized: Callable[[dict[str, list[Any]]], dict[str, Any]]) -> Any:
    rows = _rows(job)
    return rows.map(tokenized, batched=True, remove_columns=rows.column_names)


def _arguments(job: Job, flags: dict[str, Any]) -> dict[str, Any]:
    how_long: dict[str, Any] = {"num_train_epochs": 1, "logging_steps": 1, "learning_rate": 0.0} if job.is_check else {
        "max_steps": job.steps + job.warm_up, "dataloader_drop_last": True, "learning_rate": job.learning_rate
    }  # fmt: skip
    if "per_device_train_batch_size" in flags:  # a step is of as many examples, however they are cut
        flags = {**flags, "gradient_accumulation_steps": job.batch // flags["per_device_train_batch_size"]}
    return {
        "output_dir": str(job.folder / "output"), "per_device_train_batch_size": job.batch, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, **how_long, **flags,
    }  # fmt: skip


def _trainer(name: str, job: Job, model: Any, train: Any, collate: Any, flags: dict[str, Any]) -> Any:
    import transformers

    make_arguments = getattr(transformers, f"{name.removesuffix('Trainer')}TrainingArguments")
    return getattr(transformers, name)(
        model=model, args=make_arguments(**_arguments(job, flags)), train_dataset=train, data_collator=collate,
        callbacks=[job.callback()],
    )  # fmt: skip


def _train(job: Job, trainer: Any) -> None:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    job.losses.extend(losses)
