"""Tokenized splits of each task: what `tokenize_for_*` read, what they return, and the report next to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.config import DataConfig, EmbeddingConfig, RankingConfig, Refusal, Seq2SeqConfig
from toolkit.data.loading.columns import check_splits
from toolkit.data.report import DataReport, Piece
from toolkit.data.tokenize.answers import unpaired_format, weight_notes
from toolkit.data.tokenize.classification import classification_format
from toolkit.data.tokenize.columns import Batch, Plan, columns_of, is_wrapped
from toolkit.data.tokenize.diffusion import diffusion_format
from toolkit.data.tokenize.format import Format, Splits
from toolkit.data.tokenize.language import language_format
from toolkit.data.tokenize.masked_lm import masked_lm_format
from toolkit.data.tokenize.multiple_choice import multiple_choice_format
from toolkit.data.tokenize.pairs import preference_format
from toolkit.data.tokenize.preferences import PAIR
from toolkit.data.tokenize.prepare import BATCH_ROWS, STREAM_ROWS, tokenize_splits, tokenize_streams
from toolkit.data.tokenize.prompts import prompt_format
from toolkit.data.tokenize.question_answering import question_answering_format
from toolkit.data.tokenize.ranking import ranking_format
from toolkit.data.tokenize.seq2seq import seq2seq_format, set_languages
from toolkit.data.tokenize.text_groups import check_comparable, text_group_format
from toolkit.data.tokenize.token_tags import token_classification_format
from toolkit.data.tokenize.vocabulary import TOKENIZED_WITH

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPARED = {"score", "text_keys", "comparisons"}  # what check_compared reads
PLAIN_PROMPTS = ("prompt_completion", "text_pairs", "text_lists", "text_answers", "text_prompt")


class Tokenized(dict[str, Any]):
    """Tokenized splits by name (datasets, or streams), and `report`: what was counted, for `print_data_report`."""

    def __init__(self, splits: Splits, report: DataReport) -> None:
        super().__init__(splits)
        self.report = report


def tokenize_for_lm(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Documents of which every token is supervised, from any layout of columns.

    A document begins with BOS if the tokenizer uses one and ends with the end-of-text token, each once. Columns:
    `input_ids`, `length`, `supervised_tokens` and `origin`.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare(language_format("lm"), splits, tokenizer, config)


def tokenize_for_sft(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Documents of which the answers are supervised: completions, or the assistant's turns.

    Columns: as for `tokenize_for_lm`, and `labels`, aligned with `input_ids`, -100 where a token is not supervised. There
    are no labels where all tokens are.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare(language_format("sft"), splits, tokenizer, config)


def tokenize_for_diffusion(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Documents as `tokenize_for_sft` reads them, answers to prompts filled up with the end token to `answer_length` tokens.

    `config` holds the settings of DiffusionConfig too. Columns: as for `tokenize_for_sft`.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare(diffusion_format(config), splits, tokenizer, config)


def tokenize_for_preference(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, pairs_per_prompt: str = "best_worst",
    max_pairs_per_prompt: int = 10,
) -> Tokenized:  # fmt: skip
    """Pairs of a better and a worse answer to a prompt.

    A row is a pair: its `input_ids` are the tokens of the prompt, of the chosen and of the rejected answer, one behind the
    other, `prompt_tokens`, `chosen_tokens` and `rejected_tokens` of them. `length` is their sum, `supervised_tokens` that of
    the answers: each counts whole, with the end-of-text or end-of-turn token that it ends with. `pair` numbers the rows of
    all splits; `margin` is by how much the chosen answer scores higher, where the data have scores; and `origin`.

    Columns that are read: `chosen` and `rejected`, texts or chats, with `prompt` or both beginning with it; or `prompt` and
    several answers (`responses`, `completions`, `answers`, `generations`) with `scores` or `ranks`, next to or in them. Chats
    may have `tools` and `chat_template_kwargs`.

    Args:
        pairs_per_prompt: which pairs a list of answers makes: best_worst, best_others or all.
        max_pairs_per_prompt: most pairs of one list.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare(preference_format(pairs_per_prompt, max_pairs_per_prompt), splits, tokenizer, config)


def tokenize_for_unpaired(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tokenized:  # fmt: skip
    """Single answers to a prompt, each marked desirable or undesirable.

    A row is an answer: its `input_ids` are the tokens of the prompt and of the answer, `prompt_tokens` and
    `completion_tokens` of them; the answer ends as those of pairs do. `desirable` is its mark; `answer` numbers the rows of
    all splits; `prompt_key`, a hash of the prompt's tokens, is the same for answers to one prompt; `length`,
    `supervised_tokens` and `origin`.

    Columns that are read: `prompt`, `completion` and `label`, true for a desirable answer, texts or chats; or pairs, in all
    the layouts of `tokenize_for_preference`, each of which makes two rows: the chosen answer, desirable, and the rejected one.

    Args:
        desirable_weight, undesirable_weight: those of the loss; the report notes where they leave one kind without weight.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    tokenized = prepare(unpaired_format(), splits, tokenizer, config)
    report, first = tokenized.report, tokenized.report.splits[0]
    notes = weight_notes(first.classes, desirable_weight, undesirable_weight) if first.name == "train" else []
    return Tokenized(tokenized, replace(report, notes=[*report.notes, *notes]))


def tokenize_for_classification(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Texts, or pairs of them (`text_pair`), with a label as the model takes it.

    Columns: `input_ids`, `length`, `labels` (int; list of float, one a class; or float), with `class_weights` also
    `weight`, for pairs `token_type_ids` where the tokenizer has them, and `origin`. `config` holds the settings of
    ClassificationConfig too.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare(classification_format(config), splits, tokenizer, config)


def tokenize_for_question_answering(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Questions and contexts in windows of at most `max_length` tokens, of which two share `doc_stride`.

    A row is a window: `input_ids` are those of the question and of a part of the context, `start_positions` and `end_positions`
    the first and the last token of its answer, both 0 where the window doesn't hold all of it (of several answers, the first
    is trained on); `window` is its number within its question, `context_start` the place of the first token of the context,
    `char_starts` and `char_ends` the characters of each such token; `token_type_ids` where the tokenizer has them; `length`
    and `origin`.

    Columns that are read: `question`, `context` and `answers`, SQuAD's object of two lists, `text` and `answer_start`, both
    empty where the context has no answer. `config` holds the settings of QuestionAnsweringConfig too.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare(question_answering_format(config), splits, tokenizer, config)


def tokenize_for_ranking(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Queries, each with a list of documents and a label for each of these.

    A row is a list: its `input_ids` are those of the query with each document, one behind the other, each pair framed as the
    tokenizer frames two texts, `document_tokens` of each; `labels`, `documents`, how many, and `comparisons`, the pairs of them
    whose labels differ; `query_tokens`, `token_type_ids` where the tokenizer has them, `length` and `origin`. Of an over-long
    pair the document is truncated, and the query only where it alone takes more than half of the room.

    Columns that are read: `query`, `documents` and `labels` or `scores`, lists; or `query`, `document` and `label` or `score`,
    gathered by query; or `query`, `positive` and `negative`, `negatives` (a list) or `negative_1`, `negative_2` ..., whose
    labels are 1 and 0. `config` holds the settings of RankingConfig too.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return _compared("ranking", prepare(ranking_format(config), splits, tokenizer, config), config)


def tokenize_for_embedding(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, query_prompt: str = "",
    document_prompt: str = "", score_scale: float = 1.0,
) -> Tokenized:  # fmt: skip
    """Groups of texts, each of which gets an embedding of its own.

    A row's `input_ids` are its texts one behind the other, each with the special tokens that the tokenizer puts around one;
    `text_tokens`, how many each has; `text_keys`, numbers that are equal for equal texts; `score`, where the data have one;
    `length` and `origin`.

    Columns that are read: `anchor` (or `query`) and `positive`, with hard negatives in `negative`, in `negative_1`,
    `negative_2` ... or in a list, `negatives`; or `sentence1`, `sentence2` and `score`.

    Args:
        query_prompt: put before each anchor, and before both sentences of a scored pair.
        document_prompt: put before positives and negatives.
        score_scale: what scores are divided by, after which they lie between -1 and 1.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    tokenized = prepare(text_group_format(query_prompt, document_prompt, score_scale), splits, tokenizer, config)
    return _compared("embedding", tokenized, config)


def _compared(task: str, tokenized: Tokenized, config: DataConfig) -> Tokenized:
    train = tokenized["train"]
    if hasattr(train, "__len__"):
        check_compared(task, train.select_columns([*COMPARED & {*train.column_names}]).iter(BATCH_ROWS), config)
    return tokenized


def check_compared(task: str, train: Iterable[Batch], config: DataConfig) -> None:
    """Refuse a train split in which a loss of rankings or embeddings finds nothing to compare. `train`: columns of COMPARED."""
    if task == "embedding" and isinstance(config, EmbeddingConfig):
        check_comparable(train, config.embedding_loss)
    loss = config.ranking_loss if task == "ranking" and isinstance(config, RankingConfig) else "bce"
    if loss != "bce" and not any(any(batch["comparisons"]) for batch in train):
        raise Refusal(
            f"--ranking-loss {loss} compares the documents of a query, and in the train split no query has two with different "
            "labels. Add documents to the queries, or take --ranking-loss bce."
        )


def tokenize_for_masked_lm(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Texts for an encoder, each between the special tokens that its tokenizer puts there.

    Nothing is hidden yet: that is drawn in training, anew in each epoch (`build_masks`). Over-long texts that are truncated or
    split get the special tokens around each part. Columns: `input_ids`, `length`, `supervised_tokens`, with `whole_word_mask`
    also `word_starts`, and `origin`. `config` holds the settings of MaskedLMConfig too.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare(masked_lm_format(config), splits, tokenizer, config)


def tokenize_for_token_classification(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Words with a tag each, cut into sub-words one by one, as `is_split_into_words` does.

    Columns: `input_ids`; `labels`, the number of a word's tag at its first sub-word, -100 elsewhere; with `label_all_tokens` at
    all its sub-words, and those of the first ones again in `word_labels`; `length`, `supervised_tokens` and `origin`. `config`
    holds the settings of TokenClassificationConfig too.

    Columns that are read: `tokens` and `tags` (also `words`; `ner_tags`, `labels`), or `text` and `spans` (also `entities`),
    each with `start`, `end` and `label`.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare(token_classification_format(config), splits, tokenizer, config)


def tokenize_for_seq2seq(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Sources with their targets, for an encoder-decoder.

    A row's `input_ids` are the tokens of the source and then those of the target, `source_tokens` of them the source's, each
    with what the tokenizer puts around it; a target ends with the end of text. `target` is its text, `supervised_tokens` its
    tokens; `length` and `origin`.

    Columns that are read: `source` and `target`, `document` and `summary`, `article` and `highlights`, `dialogue` and
    `summary`, `text` and `summary`, `input_text` and `target_text`; or `translation`, an object with a text for each language.
    `config` holds the settings of Seq2SeqConfig too. A multilingual tokenizer is set to its two languages.

    Raises:
        Refusal: data that training must not start with, naming the row; a language that the tokenizer does not have.
    """
    form = seq2seq_format(config)
    assert isinstance(config, Seq2SeqConfig)
    set_languages(tokenizer, config.source_lang, config.target_lang)
    return prepare(form, splits, tokenizer, config)


def tokenize_for_multiple_choice(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Questions, each with a list of choices of which one is right.

    A row is a question as `tokenize_for_ranking` has a list: `input_ids` are those of the question with each choice, one behind
    the other, `document_tokens` of each, and `labels` are 1 for the right choice and 0 for the others. Of an over-long pair the
    question (or context) is truncated, and the choice only where it alone is longer than `max_length`.

    Columns that are read: `context` (also `article`, `sent1`, `ctx`, `premise`), `question` (also `sent2`) or both; `choices`
    (also `options`, `endings`), a list or ARC's object of `text` and `label`, or `ending0`, `ending1` ...; and `label` (also
    `answer`, `answerKey`), the number of the right choice, from 0, or its letter.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare(multiple_choice_format(), splits, tokenizer, config)


def tokenize_for_prompts(splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Tokenized:
    """Prompts to sample completions for.

    A row's `input_ids` are the prompt's tokens: messages are rendered with the chat template up to where an answer begins, and
    so are questions and problems where the tokenizer has a chat template; a `prompt` that is text is taken as it is, behind
    BOS if the tokenizer uses one. `row` is JSON of all columns of the data and of the prompt as given, text or messages, under
    `prompt`; `prompt` numbers the rows of all splits, those of train first; `length` and `origin`.

    Columns that are read: `prompt`, text or messages; `messages`, whose last answer is left out; `question`, `problem`; any
    others are kept for reward functions. `config` holds the settings of PromptConfig too. Over-long prompts are never cut.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    return prepare(prompt_format(config), splits, tokenizer, config)


FORMATS: dict[str, Callable[[DataConfig], Format]] = {
    "sft": lambda config: language_format("sft"),
    "lm": lambda config: language_format("lm"),
    "diffusion": diffusion_format,
    "preference": lambda config: preference_format(),
    "unpaired": lambda config: unpaired_format(),
    "classification": classification_format,
    "embedding": lambda config: text_group_format(
        score_scale=config.score_scale if isinstance(config, EmbeddingConfig) else 1.0
    ),
    "ranking": ranking_format,
    "question_answering": question_answering_format,
    "masked_lm": masked_lm_format,
    "token_classification": token_classification_format,
    "seq2seq": seq2seq_format,
    "prompts": prompt_format,
    "multiple_choice": lambda config: multiple_choice_format(),
}


def prepare(
    task: Format | str, splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig, content: str | None = None
) -> Tokenized:
    """Tokenize, check and count all splits for a task, one of FORMATS or a format with settings of its own.

    `content`: of streams to tokenize to their end, of `content_of_streams`. Without it a stream is tokenized as it is read.

    Raises:
        Refusal: data that training must not start with, naming the row.
    """
    from datasets import Dataset

    check_splits(splits)
    form = FORMATS[task](config) if isinstance(task, str) else task
    splits = form.gather(splits)
    plans, notes = plan_splits(form, splits, tokenizer, config)
    is_stream = content is None and not all(isinstance(splits[name], Dataset) for name in plans)
    work = tokenize_streams if is_stream else partial(tokenize_splits, content=content)
    tokenized, counts = work(form, {name: splits[name] for name in plans}, plans, tokenizer, config)
    notes += [f"{name}: left out, as it has no rows" for name in plans if name not in tokenized]
    first = next(iter(tokenized))
    origin, example = example_of(form, next(iter(tokenized[first])), plans[first], tokenizer)
    return Tokenized(tokenized, DataReport(
        form.describe(plans[first], tokenizer), form.longest(config), form.overlong or config.overlong, counts, notes, example,
        origin, example_names=form.part_names, first_rows=STREAM_ROWS if is_stream else None,
        length_flag=form.length_flag,
    ))  # fmt: skip


def plan_splits(
    form: Format, splits: Splits, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> tuple[dict[str, Plan], list[str]]:
    """How each split is read for a task, and what of the data or settings may surprise.

    Raises:
        Refusal: columns or settings that can't be trained with, or a tokenizer without an end-of-text token.
    """
    if form.ends_texts and tokenizer.eos_token_id is None:
        raise Refusal("The tokenizer has no end-of-text token: no text would end. Set eos_token in tokenizer_config.json")
    if form.unsplit and config.overlong == "split":
        raise Refusal(f"--overlong split: {form.unsplit}. Choose truncate, drop or refuse.")
    plans, notes = form.plan(splits, config)
    for name, plan in plans.items():
        if TOKENIZED_WITH in columns_of(splits[name], name):
            plans[name] = replace(plan, columns=(*plan.columns, TOKENIZED_WITH))
    name, plan = next(iter(plans.items()))
    source = str(splits[name].info.description or "").partition("; rows: ")[0]
    if source.startswith(("mixture: ", "mixture of streams: ")):
        notes.append(source)
    unread = [column for column in columns_of(splits[name], name) if column not in plan.columns]
    if unread:
        notes.append(f"columns not read: {', '.join(unread)}")
    if form.longest(config) > tokenizer.model_max_length:
        limit = f"the limit of {tokenizer.model_max_length} tokens that the tokenizer has for its model"
        notes.append(f"{form.length_flag} {form.longest(config)} is above {limit}")
    if plan.layout in PLAIN_PROMPTS and tokenizer.chat_template:
        notes.append(
            "prompts are plain text, trained without the tokenizer's chat template; it is applied to messages ({role, content})"
        )
    if is_wrapped(config):
        notes.append("documents longer than a row continue in the next one (--packing-strategy wrapped)")
    if plan.supervise == PAIR:
        notes.append("median, 95 % and longest are of a prompt with its longer answer")
    return plans, notes


def example_of(form: Format, row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    """Where a tokenized row comes from, and its text in pieces."""
    said, pieces = form.show(row, plan, tokenizer)
    origin = row.get("origin") or "row 0"
    return f"{origin}, {said}" if said else origin, pieces
