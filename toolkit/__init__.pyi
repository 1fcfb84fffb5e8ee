# The public names, each with the file it is in. lazy_loader reads this file when the package is imported, and loads a file when
# a name of it is first used; type checkers and editors read it as an ordinary stub.

from .checkpoint import (
    latest_checkpoint as latest_checkpoint,
)
from .checkpoint import (
    load_checkpoint as load_checkpoint,
)
from .checkpoint import (
    prune_checkpoints as prune_checkpoints,
)
from .checkpoint import (
    save_checkpoint as save_checkpoint,
)
from .checkpoint import (
    verify_checkpoint as verify_checkpoint,
)
from .cli.recipe import run_recipe as run_recipe
from .config import (
    AdapterConfig as AdapterConfig,
)
from .config import (
    CausalLMConfig as CausalLMConfig,
)
from .config import (
    ClassificationConfig as ClassificationConfig,
)
from .config import (
    DataConfig as DataConfig,
)
from .config import (
    DevicesConfig as DevicesConfig,
)
from .config import (
    HubConfig as HubConfig,
)
from .config import (
    ModelConfig as ModelConfig,
)
from .config import (
    OptimConfig as OptimConfig,
)
from .config import (
    OutputConfig as OutputConfig,
)
from .config import (
    PairsConfig as PairsConfig,
)
from .config import (
    PreferenceConfig as PreferenceConfig,
)
from .config import (
    RankedAnswersConfig as RankedAnswersConfig,
)
from .config import (
    ReferenceConfig as ReferenceConfig,
)
from .config import (
    Refusal as Refusal,
)
from .config import (
    RewardConfig as RewardConfig,
)
from .config import (
    RunConfig as RunConfig,
)
from .config import (
    SampleConfig as SampleConfig,
)
from .config import (
    SeedConfig as SeedConfig,
)
from .config import (
    Settings as Settings,
)
from .config import (
    UnpairedConfig as UnpairedConfig,
)
from .config import (
    setting as setting,
)
from .config import (
    trained_model as trained_model,
)
from .config.conditions import is_built_in as is_built_in
from .data.demo_corpus.texts import (
    answer_baselines as answer_baselines,
)
from .data.demo_corpus.texts import (
    class_baselines as class_baselines,
)
from .data.demo_corpus.texts import (
    preference_baselines as preference_baselines,
)
from .data.demo_corpus.texts import (
    text_baselines as text_baselines,
)
from .data.demo_corpus.texts import (
    text_size as text_size,
)
from .data.demo_corpus.texts import (
    texts_of as texts_of,
)
from .data.demo_corpus.texts import (
    unpaired_baselines as unpaired_baselines,
)
from .data.loading.batch import Batch as Batch
from .data.loading.collate import collate_packed as collate_packed
from .data.loading.collate import collate_padded as collate_padded
from .data.loading.collate_answers import collate_answers as collate_answers
from .data.loading.collate_pairs import collate_pairs as collate_pairs
from .data.loading.loaders import build_dataloaders as build_dataloaders
from .data.loading.mismatched import mismatch_answers as mismatch_answers
from .data.loading.order import epoch_order as epoch_order
from .data.loading.order import seed_micro_batch as seed_micro_batch
from .data.loading.packing import pack_best_fit as pack_best_fit
from .data.loading.packing import pack_wrapped as pack_wrapped
from .data.sources.load import load_splits as load_splits
from .data.tokenize.labels import label_names as label_names
from .data.tokenize.labels import label_settings as label_settings
from .data.tokenize.tasks import (
    tokenize_for_classification as tokenize_for_classification,
)
from .data.tokenize.tasks import (
    tokenize_for_lm as tokenize_for_lm,
)
from .data.tokenize.tasks import (
    tokenize_for_preference as tokenize_for_preference,
)
from .data.tokenize.tasks import (
    tokenize_for_sft as tokenize_for_sft,
)
from .data.tokenize.tasks import (
    tokenize_for_unpaired as tokenize_for_unpaired,
)
from .diagnostics.memory_table import (
    memory_table as memory_table,
)
from .diagnostics.memory_table import (
    used_memory as used_memory,
)
from .diagnostics.memory_table import (
    zero_memory_table as zero_memory_table,
)
from .export.model_directory import save_model as save_model
from .generation.samples import sample_prompts as sample_prompts
from .generation.samples import sample_texts as sample_texts
from .hub.uploads import save_to_hub as save_to_hub
from .losses.answer_logps import answer_logps as answer_logps
from .losses.answer_logps import mismatched_logps as mismatched_logps
from .losses.answer_logps import pair_logps as pair_logps
from .losses.causal_lm import (
    causal_lm_loss as causal_lm_loss,
)
from .losses.causal_lm import (
    causal_lm_metrics as causal_lm_metrics,
)
from .losses.causal_lm import (
    causal_lm_metrics_with_bytes as causal_lm_metrics_with_bytes,
)
from .losses.classification import (
    classification_loss as classification_loss,
)
from .losses.classification import (
    classification_task as classification_task,
)
from .losses.classification import (
    multi_label_loss as multi_label_loss,
)
from .losses.classification import (
    regression_loss as regression_loss,
)
from .losses.pair_logps import PairLogps as PairLogps
from .losses.preference import (
    needs_reference as needs_reference,
)
from .losses.preference import (
    preference_loss as preference_loss,
)
from .losses.preference import (
    preference_metrics as preference_metrics,
)
from .losses.reference_free import cpo_loss as cpo_loss
from .losses.reference_free import orpo_loss as orpo_loss
from .losses.reference_free import sft_loss as sft_loss
from .losses.reference_free import simpo_loss as simpo_loss
from .losses.reward import pair_rewards as pair_rewards
from .losses.reward import reward_loss as reward_loss
from .losses.reward import reward_metrics as reward_metrics
from .losses.unpaired import apo_zero_unpaired_loss as apo_zero_unpaired_loss
from .losses.unpaired import kto_kl as kto_kl
from .losses.unpaired import kto_loss as kto_loss
from .losses.unpaired_preference import unpaired_loss as unpaired_loss
from .losses.unpaired_preference import unpaired_metrics as unpaired_metrics
from .losses.with_reference import (
    aot_loss as aot_loss,
)
from .losses.with_reference import (
    aot_unpaired_loss as aot_unpaired_loss,
)
from .losses.with_reference import (
    apo_down_loss as apo_down_loss,
)
from .losses.with_reference import (
    apo_zero_loss as apo_zero_loss,
)
from .losses.with_reference import (
    bco_pair_loss as bco_pair_loss,
)
from .losses.with_reference import (
    desensitized_weights as desensitized_weights,
)
from .losses.with_reference import (
    discopop_loss as discopop_loss,
)
from .losses.with_reference import (
    exo_pair_loss as exo_pair_loss,
)
from .losses.with_reference import (
    hinge_loss as hinge_loss,
)
from .losses.with_reference import (
    ipo_loss as ipo_loss,
)
from .losses.with_reference import (
    nca_pair_loss as nca_pair_loss,
)
from .losses.with_reference import (
    robust_loss as robust_loss,
)
from .losses.with_reference import (
    sigmoid_loss as sigmoid_loss,
)
from .losses.with_reference import (
    sigmoid_norm_loss as sigmoid_norm_loss,
)
from .losses.with_reference import (
    sppo_hard_loss as sppo_hard_loss,
)
from .metrics.classification import classification_metrics as classification_metrics
from .models.load import load_model as load_model
from .models.lora import add_adapter as add_adapter
from .models.padding import pad_apart_from_end as pad_apart_from_end
from .models.tokenizer import load_tokenizer as load_tokenizer
from .models.tokenizer import train_tokenizer as train_tokenizer
from .optim.optimizers import build_optimizer as build_optimizer
from .optim.optimizers import build_schedule as build_schedule
from .preference.kl_estimate import estimate_kl as estimate_kl
from .preference.pair_layouts import choose_answer_layout as choose_answer_layout
from .preference.pair_layouts import choose_pair_layout as choose_pair_layout
from .preference.reference import Reference as Reference
from .preference.reference import build_reference as build_reference
from .preference.reference import sync_reference as sync_reference
from .report import write_report as write_report
from .runs.directory import check_output_dir as check_output_dir
from .runs.directory import claimed as claimed
from .runs.directory import write_summary as write_summary
from .runs.overview import verdict_of as verdict_of
from .runs.run_card import end_run_card as end_run_card
from .runs.run_card import write_run_card as write_run_card
from .runs.summary import Summary as Summary
from .system.interruptions import Interrupted as Interrupted
from .system.json_lines import append_line as append_line
from .training.accelerator import build_accelerator as build_accelerator
from .training.best import load_best as load_best
from .training.best import stopped_improving as stopped_improving
from .training.divergence import Divergence as Divergence
from .training.evaluation import Metrics as Metrics
from .training.evaluation import eval_with_gather as eval_with_gather
from .training.guard import Unstable as Unstable
from .training.guard import report_nonfinite as report_nonfinite
from .training.memory import fit_micro_batch as fit_micro_batch
from .training.run import Run as Run
from .training.run import open_run as open_run
from .training.step import (
    accumulate_gradients as accumulate_gradients,
)
from .training.step import (
    accumulate_micro_batch as accumulate_micro_batch,
)
from .training.step import (
    clip_and_update as clip_and_update,
)
from .training.step import (
    sum_over_ranks as sum_over_ranks,
)
from .training.step import (
    to_device as to_device,
)
from .training.step import (
    train_step as train_step,
)

__version__: str
