"""The settings groups of tasks: language modeling, diffusion, classes, tags, spans, texts, rankings, embeddings and prompts."""

# ruff: noqa: RUF009 - setting() makes a dataclass field; ruff takes it for a default that all instances share

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.groups import SeedConfig
from toolkit.config.setting import Settings, setting


@dataclass(frozen=True)
class LossConfig(Settings):
    """Loss"""

    label_smoothing_factor: float = setting(0.0, "Label smoothing.", least=0.0, below=1.0, on_resume="fixed")


@dataclass(frozen=True)
class CausalLMConfig(LossConfig):
    """Loss"""

    z_loss: float = setting(0.0, "Weight of the squared log-normalizer (PaLM, section 5).", least=0.0, on_resume="fixed")


@dataclass(frozen=True)
class MaskedLMConfig(Settings):
    """Masks"""

    mlm_probability: float = setting(
        0.15, "Share of the tokens that are hidden and predicted.", above=0.0, below=1.0, on_resume="fixed"
    )
    mlm_probability_end: float | None = setting(
        None, "The share at the end of the run, where it changes from step to step in a line; also that of evaluations. "
        "Default: it stays.", above=0.0, below=1.0, on_resume="fixed",
    )
    mask_replace_prob: float = setting(
        0.8, "Share of these that the mask token replaces.", least=0.0, most=1.0, on_resume="fixed"
    )
    random_replace_prob: float = setting(
        0.1, "Share of these that a random token replaces; the rest is kept as it is.", least=0.0, most=1.0, on_resume="fixed"
    )
    whole_word_mask: bool = setting(False, "Hide whole words: all tokens of one, or none.", on_resume="fixed")


@dataclass(frozen=True)
class ClassificationConfig(LossConfig):
    """Classification"""

    problem_type: str = setting(
        "single_label", "What a label is: a class, a list of classes, or a number.",
        choices=("single_label", "multi_label", "regression"), on_resume="fixed",
    )
    class_weights: list[float] = setting(
        [], "Weight of each class in the loss, in the order in which the report lists them.", least=0.0, on_resume="fixed",
    )
    metrics: list[str] = setting(
        [], "Metrics on the evaluation split: built-in names, or an evaluate module. Default: accuracy and f1; of numbers mse, "
        "mae and r2.", on_resume="free",
    )


@dataclass(frozen=True)
class RowsConfig(Settings):
    """Rows"""

    row_layout: str = setting(
        "auto", "packed: examples of a micro-batch are computed one behind the other, without their padding. padded: each in "
        "a separate row. auto: packed where that is exact. Dropout masks differ between the two, nothing else.",
        choices=("auto", "packed", "padded"), on_resume="fixed",
    )


@dataclass(frozen=True)
class QuestionAnsweringConfig(Settings):
    """Question answering"""

    doc_stride: int = setting(128, "Tokens that two windows of a long context share.", least=0, most=2**20, on_resume="fixed")
    max_answer_length: int = setting(
        30, "Longest answer that is looked for, in tokens.", least=1, most=2**16, on_resume="evaluation"
    )
    n_best_size: int = setting(20, "Best spans that are kept of each window.", least=1, most=2**12, on_resume="evaluation")
    null_score_diff_threshold: float = setting(
        0.0, "Where questions may have no answer: predict none where it scores more than this above the best span. "
        "best_f1_thresh of an evaluation is the best value.", on_resume="evaluation",
    )


@dataclass(frozen=True)
class TokenClassificationConfig(LossConfig):
    """Token classification"""

    tag_scheme: str = setting(
        "auto", "How tags mark entities: with B- and I- (iob1, iob2), E- and S- too (iobes), or not at all (plain: each word "
        "counts). One that is named is checked row by row.",
        choices=("auto", "plain", "iob1", "iob2", "iobes"), on_resume="fixed",
    )
    label_all_tokens: bool = setting(
        False, "Train all sub-words of a word on its tag, not only the first. Metrics are of the first in any case.",
        on_resume="fixed",
    )
    strict_entities: bool = setting(
        False, "Count only entities whose tags follow the scheme (seqeval's strict mode); else I- after O begins one too.",
        on_resume="fixed",
    )
    metrics: list[str] = setting(
        [], "Metrics on the evaluation split: accuracy, precision, recall, f1 (of entities micro averages, of plain tags "
        "macro), with _micro, _macro, _weighted or _per_class. Default: these four and f1_macro.", on_resume="free",
    )


@dataclass(frozen=True)
class Seq2SeqConfig(LossConfig):
    """Source and target"""

    max_target_length: int = setting(
        128, "Longest target, in tokens; max_length is that of the source.", least=2, most=2**20, on_resume="fixed"
    )
    source_prefix: str | None = setting(
        None, "Put before each source, such as 'summarize: ' for T5.", keeps_spaces=True, on_resume="fixed"
    )
    source_lang: str | None = setting(
        None, "Language of the sources: a key of translation, and the code of a multilingual tokenizer (en_XX, eng_Latn).",
        on_resume="fixed",
    )
    target_lang: str | None = setting(None, "Language of the targets, likewise.", on_resume="fixed")


@dataclass(frozen=True)
class GeneratedTextConfig(SeedConfig):
    """Generated texts"""

    predict_with_generate: bool = setting(
        True, "Generate a text for each evaluation example, and compare it with its reference.", on_resume="free"
    )
    metrics: list[str] = setting(
        [], "Metrics of the texts: bleu, chrf, rouge, exact_match, or a module of evaluate. Default: these four, as far as "
        "sacrebleu and rouge-score are installed.", on_resume="free",
    )
    num_beams: int | None = setting(
        None, "Beams of the search; 1 is greedy decoding. Default: as in the model's generation_config.", least=1, most=1024,
        aliases=("generation_num_beams",), on_resume="free",
    )
    max_new_tokens: int | None = setting(
        None, "Longest generated text, in tokens. Default: max_target_length.", least=1, most=2**20, on_resume="free"
    )
    do_sample: bool = setting(False, "Draw each token at random, the same ones at every evaluation.", on_resume="free")
    temperature: float = setting(1.0, "Temperature of the draws.", above=0.0, on_resume="free")
    top_p: float = setting(
        1.0, "Draw from the most probable tokens that sum up to this.", above=0.0, most=1.0, on_resume="free"
    )
    length_penalty: float | None = setting(
        None, "Of beams: above 0 prefers longer texts. Default: as in the model's generation_config.", on_resume="free"
    )
    no_repeat_ngram_size: int | None = setting(
        None, "No sequence of N tokens twice in a text. Default: as in the model's generation_config.", least=0, most=1024,
        on_resume="free",
    )
    num_samples: int = setting(3, "Generated texts to show at each evaluation.", least=0, most=10**4, on_resume="free")


@dataclass(frozen=True)
class RankingConfig(Settings):
    """Ranking"""

    ranking_loss: str = setting(
        "lambda", "Loss of a query's documents. bce: each by itself, labels 0 to 1. ranknet: each better one above each worse. "
        "margin_mse: as far above it as by the labels. listnet: softmax of the list. lambda: as nDCG counts (LambdaLoss).",
        choices=("bce", "ranknet", "margin_mse", "listnet", "lambda"), on_resume="fixed",
    )
    positive_weight: float = setting(
        1.0, "bce: how often a relevant document counts, such as how many irrelevant ones there are for each.", above=0.0,
        on_resume="fixed",
    )


@dataclass(frozen=True)
class EmbeddingConfig(Settings):
    """Embeddings"""

    embedding_loss: str = setting(
        "auto", "info_nce: each anchor finds its positive among all documents of the global batch (MultipleNegativesRanking). "
        "cosent, cosine: for pairs with a score. auto: info_nce, or cosent where rows have scores.",
        choices=("auto", "info_nce", "cosent", "cosine"), on_resume="fixed",
    )
    temperature: float = setting(
        0.05, "info_nce and cosent: cosines are divided by it; 1 / scale of sentence-transformers.", above=0.0,
        on_resume="fixed",
    )
    two_way: bool = setting(False, "info_nce: each positive also finds its anchor among all anchors.", on_resume="fixed")
    false_negative_margin: float | None = setting(
        None, "info_nce: leave out documents whose cosine is above the positive's by more than this.", least=-2.0, most=2.0,
        on_resume="fixed",
    )
    matryoshka_dims: list[int] = setting(
        [], "Also train and evaluate embeddings cut to their first N numbers, such as 256,128,64.", least=1, most=2**16,
        on_resume="fixed",
    )
    pooling: str = setting(
        "auto", "The embedding of a text: mean over its tokens, or the state of the first (cls) or last one. auto: as the "
        "model was trained, else mean.", choices=("auto", "mean", "cls", "last"), on_resume="fixed",
    )
    query_prompt: str | None = setting(
        None, "Text put before each anchor, such as 'query: '. Default: the model's own.", keeps_spaces=True, on_resume="fixed"
    )
    document_prompt: str | None = setting(
        None, "Text put before each positive and negative. Default: the model's own.", keeps_spaces=True, on_resume="fixed",
    )
    score_scale: float = setting(1.0, "Scores are divided by it: 5 where they go from 0 to 5.", above=0.0, on_resume="fixed")


@dataclass(frozen=True)
class AnswerConfig(Settings):
    """Answers"""

    metrics: list[str] = setting(
        [], "Answer each held-out prompt at each evaluation, by greedy decoding, and compare: bleu, chrf, rouge, exact_match, "
        "or a module of evaluate. Default: none.", on_resume="evaluation",
    )
    answer_max_new_tokens: int = setting(
        256, "Longest of these answers, in tokens.", least=1, most=2**20, on_resume="evaluation"
    )


@dataclass(frozen=True)
class SampleConfig(SeedConfig):
    """Samples"""

    num_samples: int = setting(3, "Text samples at each evaluation.", least=0, most=10**4, on_resume="free")
    sample_max_new_tokens: int = setting(64, "Length of a sample in tokens.", least=1, most=2**20, on_resume="free")
    sample_temperature: float = setting(0.7, "Temperature of the samples; 0 is greedy.", least=0.0, on_resume="free")


@dataclass(frozen=True)
class PromptConfig(Settings):
    """Prompts"""

    max_prompt_length: int = setting(512, "Longest prompt, in tokens.", least=1, most=2**24, on_resume="fixed")
    overlong_prompts: str = setting(
        "drop", "What to do with longer prompts, which are never cut: drop, each counted; or refuse.",
        choices=("drop", "refuse"), on_resume="fixed",
    )


@dataclass(frozen=True)
class DiffusionConfig(Settings):
    """Masked diffusion"""

    shift_logits: bool | None = setting(
        None, "Predict a token at its left neighbor, as the causal model did that training begins from. Default: from such a "
        "model yes; from scratch and from a masked language model no.", on_resume="fixed",
    )
    attention_annealing: float = setting(
        0.0, "Share of the run in which attention goes from causal to both sides, when training begins from a causal model "
        "(DiffuLLaMA). 0: both sides from the first step.", least=0.0, most=1.0, on_resume="fixed",
    )
    answer_length: int = setting(
        128, "Tokens that each answer to a prompt is filled up to with its end token, so that the model learns where to end; "
        "also what is sampled by default.", least=1, most=2**20, on_resume="fixed",
    )
    denoising_steps: int | None = setting(
        None, "Forward passes in which a sample is written. Default: one for each token.", least=1, most=2**20,
        on_resume="evaluation",
    )
    block_length: int = setting(
        32, "Tokens of a sample that are finished before the next ones are begun (semi-autoregressive).", least=1, most=2**20,
        on_resume="evaluation",
    )
