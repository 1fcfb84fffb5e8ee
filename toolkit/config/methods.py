"""The settings groups of single methods, which only the recipes of these methods inherit."""

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
    whole_word_mask: bool = setting(
        False, "Hide whole words: all tokens of one, or none.", on_resume="fixed"
    )


@dataclass(frozen=True)
class ClassificationConfig(LossConfig):
    """Classification"""

    problem_type: str = setting(
        "single_label", "What a label is: a class, a list of classes, or a number.",
        choices=("single_label", "multi_label", "regression"), on_resume="fixed",
    )
    class_weights: list[float] = setting(
        [], "Weight of each class in the loss, in the order of the labels.", least=0.0, on_resume="fixed"
    )
    metrics: list[str] = setting(
        [], "Metrics on the evaluation split: built-in names, or an evaluate module. Default: accuracy and f1; of numbers mse, "
        "mae and r2.", on_resume="free",
    )


@dataclass(frozen=True)
class QuestionAnsweringConfig(Settings):
    """Question answering"""

    doc_stride: int = setting(
        128, "Tokens that two windows of a long context share.", least=0, most=2**20, on_resume="fixed"
    )
    max_answer_length: int = setting(
        30, "Longest answer that is looked for, in tokens.", least=1, most=2**16, on_resume="evaluation"
    )
    n_best_size: int = setting(
        20, "Best spans that are kept of each window.", least=1, most=2**12, on_resume="evaluation"
    )
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
    source_prefix: str | None = setting(None, "Put before each source, such as 'summarize: ' for T5.", on_resume="fixed")
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
        None, "Beams of the search; 1 is greedy decoding. Default: as the model's generation_config says.", least=1, most=1024,
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
        None, "Of beams: above 0 prefers longer texts. Default: as the model's generation_config says.", on_resume="free"
    )
    no_repeat_ngram_size: int | None = setting(
        None, "No sequence of N tokens twice in a text. Default: as the model's generation_config says.", least=0, most=1024,
        on_resume="free",
    )
    num_samples: int = setting(3, "Generated texts to show at each evaluation.", least=0, most=10**4, on_resume="free")


@dataclass(frozen=True)
class PreferenceConfig(Settings):
    """Preference loss"""

    loss_type: list[str] = setting(
        ["sigmoid"], "Losses of a pair, by TRL's names; several are added. sigmoid: DPO. sft: likelihood of chosen answers. "
        "simpo, cpo, orpo, sft: without a reference model.",
        choices=("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop", "nca_pair", "bco_pair",
                 "sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired", "simpo", "cpo", "orpo", "sft"), on_resume="fixed",
    )
    loss_weights: list[float] = setting([], "Weight of each of these losses. Default: 1 each.", on_resume="fixed")
    beta: float = setting(
        0.1, "How strongly the policy is held to the reference model; ipo: its τ, orpo: its λ.", above=0.0, on_resume="fixed"
    )
    label_smoothing: float = setting(
        0.0, "Share of pairs whose labels are taken to be flipped (conservative DPO, robust, exo_pair, aot ...).",
        least=0.0, below=0.5, on_resume="fixed",
    )
    f_divergence_type: str = setting(
        "reverse_kl", "Divergence between policy and reference (f-DPO).",
        choices=("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"), on_resume="fixed",
    )
    f_alpha_divergence_coef: float = setting(
        0.5, "alpha_divergence: from 0, the forward KL, to 1, the reverse KL (1 - α of the paper, as TRL computes it).",
        least=0.0, most=1.0, on_resume="fixed",
    )
    ld_alpha: float | None = setting(
        None, "LD-DPO: weight of an answer's tokens beyond the length of the pair's shorter answer.", least=0.0, most=1.0,
        on_resume="fixed",
    )
    discopop_tau: float = setting(
        0.05, "discopop: temperature of the switch between its two losses.", above=0.0, most=1.0, on_resume="fixed"
    )
    simpo_gamma: float = setting(
        0.5, "simpo: the margin that the chosen answer's reward should have.", least=0.0, on_resume="fixed"
    )
    cpo_alpha: float = setting(1.0, "cpo: weight of the likelihood of chosen answers, per token.", least=0.0, on_resume="fixed")


@dataclass(frozen=True)
class UnpairedConfig(Settings):
    """Unpaired loss"""

    loss_type: str = setting(
        "kto", "Loss of an answer, by TRL's names. kto: measured from the divergence so far. apo_zero_unpaired: from 0.",
        choices=("kto", "apo_zero_unpaired"), on_resume="fixed",
    )
    beta: float = setting(0.1, "How strongly the policy is held to the reference model.", above=0.0, on_resume="fixed")
    desirable_weight: float = setting(
        1.0, "Weight of desirable answers in the loss; more where they are few, so that both kinds weigh about the same.",
        above=0.0, on_resume="fixed",
    )
    undesirable_weight: float = setting(1.0, "Weight of undesirable answers in the loss.", above=0.0, on_resume="fixed")


@dataclass(frozen=True)
class RankedAnswersConfig(Settings):
    """Lists of answers"""

    pairs_per_prompt: str = setting(
        "best_worst", "Pairs made of a list of scored or ranked answers. best_others: the best with each worse one. all: each "
        "with each worse one.",
        choices=("best_worst", "best_others", "all"), on_resume="fixed",
    )
    max_pairs_per_prompt: int = setting(
        10, "Most pairs of one list: those whose answers lie furthest apart.", least=1, most=10**6, on_resume="fixed"
    )


@dataclass(frozen=True)
class RewardConfig(Settings):
    """Reward model"""

    center_rewards_coefficient: float | None = setting(
        None, "Weight of the square of a pair's summed rewards, which holds their mean near 0; 0.01 is usual.", least=0.0,
        on_resume="fixed",
    )
    margin_coefficient: float = setting(
        0.0, "A chosen reward must lead by N times the row's margin: its column margin, or how far its scores differ. "
        "TRL: 1.",
        least=0.0, on_resume="fixed",
    )


@dataclass(frozen=True)
class RankingConfig(Settings):
    """Ranking"""

    ranking_loss: str = setting(
        "lambda", "Loss of a query's documents. bce: each by itself, labels 0 to 1. ranknet: each better one above each worse. "
        "margin_mse: as far above it as labels say. listnet: softmax of the list. lambda: as nDCG counts (LambdaLoss).",
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
        None, "Text put before each anchor, such as 'query: '. Default: the model's own.", on_resume="fixed"
    )
    document_prompt: str | None = setting(
        None, "Text put before each positive and negative. Default: the model's own.", on_resume="fixed"
    )
    score_scale: float = setting(1.0, "Scores are divided by it: 5 where they go from 0 to 5.", above=0.0, on_resume="fixed")


@dataclass(frozen=True)
class AdapterConfig(Settings):
    """Adapter"""

    use_peft: bool = setting(False, "Train a LoRA adapter on top of the frozen model.", on_resume="fixed")
    lora_r: int = setting(16, "Rank: columns of B and rows of A in each update B A.", least=1, most=2**14, on_resume="fixed")
    lora_alpha: float = setting(32.0, "The update is multiplied by lora_alpha / lora_r.", above=0.0, on_resume="fixed")
    lora_dropout: float = setting(0.0, "Dropout on the input of A.", least=0.0, below=1.0, on_resume="fixed")
    lora_target_modules: list[str] = setting(
        ["all-linear"], "Modules that are adapted: their names, or one regex over full names. all-linear: all but the head.",
        on_resume="fixed",
    )
    lora_modules_to_save: list[str] = setting(
        [], "Modules trained whole and saved with the adapter; those with new, random weights always are.", on_resume="fixed"
    )
    lora_trainable_tokens: list[str] = setting(
        [], "Tokens that learn an embedding of their own. template: those that the chat template writes, which a base model "
        "may never have seen.", on_resume="fixed",
    )
    lora_rank_pattern: list[str] = setting([], "Ranks by module name, as regex=rank.", on_resume="fixed")
    lora_alpha_pattern: list[str] = setting([], "Alphas by module name, as regex=alpha.", on_resume="fixed")
    lora_layers_to_transform: list[int] = setting(
        [], "Numbers of the layers that are adapted. Default: all.", least=0, most=2**10, on_resume="fixed"
    )
    use_rslora: bool = setting(
        False, "Multiply the update by lora_alpha / sqrt(lora_r), so that high ranks learn as fast.", on_resume="fixed"
    )
    use_dora: bool = setting(
        False, "DoRA: train the length of each output's weights apart from their direction.", on_resume="fixed"
    )
    init_lora_weights: str = setting(
        "true", "First weights: true (A as in a linear layer, B zero), gaussian, orthogonal, pissa, pissa_niter_16 (faster) or "
        "olora.", on_resume="fixed",
    )
    loraplus_lr_ratio: float = setting(
        1.0, "LoRA+: the matrices B learn N times as fast as the rest.", above=0.0, on_resume="fixed"
    )
    load_in_4bit: bool = setting(
        False, "QLoRA: hold the frozen weights in 4 bits. Needs bitsandbytes, on CUDA or a CPU.", on_resume="fixed"
    )
    bnb_4bit_quant_type: str = setting("nf4", "Code of the 4-bit numbers.", choices=("nf4", "fp4"), on_resume="fixed")
    bnb_4bit_use_double_quant: bool = setting(
        False, "Quantize the scales of the 4-bit blocks as well: 0.4 bits less a weight.", on_resume="fixed"
    )


@dataclass(frozen=True)
class PairsConfig(Settings):
    """Pairs"""

    pair_layout: str = setting(
        "auto", "shared: a prompt is encoded once for both answers. packed: twice, unpadded. auto: the fastest exact one.",
        choices=("auto", "shared", "packed", "padded"), on_resume="fixed",
    )


@dataclass(frozen=True)
class ReferenceConfig(Settings):
    """Reference"""

    reference: str = setting(
        "auto", "cache: computed once, kept on disk. adapter: the model with its adapter off. model: a second one in memory.",
        choices=("auto", "cache", "adapter", "model"), on_resume="fixed",
    )
    sync_ref_model: bool = setting(
        False, "TR-DPO: draw the reference, a second model, toward the trained one.", on_resume="fixed"
    )
    ref_model_mixup_alpha: float = setting(
        0.6, "Share of the trained model in the synced reference.", above=0.0, most=1.0, on_resume="fixed"
    )
    ref_model_sync_steps: int = setting(512, "Steps between two syncs.", least=1, most=10**9, on_resume="fixed")


@dataclass(frozen=True)
class SampleConfig(SeedConfig):
    """Samples"""

    num_samples: int = setting(3, "Text samples at each evaluation.", least=0, most=10**4, on_resume="free")
    sample_max_new_tokens: int = setting(64, "Length of a sample in tokens.", least=1, most=2**20, on_resume="free")
    sample_temperature: float = setting(0.7, "Temperature of the samples; 0 is greedy.", least=0.0, on_resume="free")
