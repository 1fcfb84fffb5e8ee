# The public names, each with the file it is in. lazy_loader reads this file when the package is imported, and loads a file when
# a name of it is first used; type checkers and editors read it as an ordinary stub.

from .baselines.classes import class_baselines as class_baselines, tag_baselines as tag_baselines
from .baselines.language import (
    answer_baselines as answer_baselines,
    masked_token_baselines as masked_token_baselines,
    text_baselines as text_baselines,
)
from .baselines.preference import preference_baselines as preference_baselines, unpaired_baselines as unpaired_baselines
from .baselines.question import question_baselines as question_baselines
from .baselines.seq2seq import copy_baselines as copy_baselines
from .baselines.word_overlap import (
    choice_baselines as choice_baselines,
    ranking_baselines as ranking_baselines,
    retrieval_baselines as retrieval_baselines,
)
from .command_line.recipe import run_recipe as run_recipe
from .config.adapter import AdapterConfig as AdapterConfig
from .config.conditions import is_built_in as is_built_in
from .config.distillation import (
    ClassifierDistillationConfig as ClassifierDistillationConfig,
    DistillationConfig as DistillationConfig,
)
from .config.groups import (
    DataConfig as DataConfig,
    ModelConfig as ModelConfig,
    OptimConfig as OptimConfig,
    trained_model as trained_model,
)
from .config.policy import PolicyConfig as PolicyConfig, PPOConfig as PPOConfig
from .config.preferences import (
    PairsConfig as PairsConfig,
    PreferenceConfig as PreferenceConfig,
    RankedAnswersConfig as RankedAnswersConfig,
    ReferenceConfig as ReferenceConfig,
    RewardConfig as RewardConfig,
    UnpairedConfig as UnpairedConfig,
)
from .config.rollouts import RewardFunctionsConfig as RewardFunctionsConfig, RolloutConfig as RolloutConfig
from .config.run_groups import DeviceConfig as DeviceConfig, OutputConfig as OutputConfig, RunConfig as RunConfig
from .config.setting import Refusal as Refusal, setting as setting
from .config.tasks import (
    AnswerConfig as AnswerConfig,
    CausalLMConfig as CausalLMConfig,
    ClassificationConfig as ClassificationConfig,
    DiffusionConfig as DiffusionConfig,
    EmbeddingConfig as EmbeddingConfig,
    GeneratedTextConfig as GeneratedTextConfig,
    MaskedLMConfig as MaskedLMConfig,
    PromptConfig as PromptConfig,
    QuestionAnsweringConfig as QuestionAnsweringConfig,
    RankingConfig as RankingConfig,
    RowsConfig as RowsConfig,
    SampleConfig as SampleConfig,
    Seq2SeqConfig as Seq2SeqConfig,
    TokenClassificationConfig as TokenClassificationConfig,
)
from .data.loading.batch import Batch as Batch, model_inputs as model_inputs
from .data.loading.collate import (
    collate_packed as collate_packed,
    collate_padded as collate_padded,
    collate_prompts as collate_prompts,
    collate_seq2seq as collate_seq2seq,
    collate_windows as collate_windows,
)
from .data.loading.collate_groups import collate_lists as collate_lists, collate_text_groups as collate_text_groups
from .data.loading.collate_pairs import (
    collate_answers as collate_answers,
    collate_pairs as collate_pairs,
    collate_scored_pairs as collate_scored_pairs,
)
from .data.loading.loaders import build_dataloaders as build_dataloaders
from .data.loading.mismatched import mismatch_answers as mismatch_answers
from .data.loading.noise import build_noise as build_noise
from .data.loading.order import epoch_order as epoch_order, seed_micro_batch as seed_micro_batch
from .data.loading.token_masks import build_masks as build_masks
from .data.report import print_data_report as print_data_report
from .data.sources.load import load_splits as load_splits
from .data.texts import texts_of as texts_of
from .data.tokenize.labels import label_settings as label_settings
from .data.tokenize.question_answering import reference_answers as reference_answers
from .data.tokenize.tags import find_tags as find_tags
from .data.tokenize.tasks import (
    tokenize_for_classification as tokenize_for_classification,
    tokenize_for_diffusion as tokenize_for_diffusion,
    tokenize_for_embedding as tokenize_for_embedding,
    tokenize_for_lm as tokenize_for_lm,
    tokenize_for_masked_lm as tokenize_for_masked_lm,
    tokenize_for_multiple_choice as tokenize_for_multiple_choice,
    tokenize_for_preference as tokenize_for_preference,
    tokenize_for_prompts as tokenize_for_prompts,
    tokenize_for_question_answering as tokenize_for_question_answering,
    tokenize_for_ranking as tokenize_for_ranking,
    tokenize_for_seq2seq as tokenize_for_seq2seq,
    tokenize_for_sft as tokenize_for_sft,
    tokenize_for_token_classification as tokenize_for_token_classification,
    tokenize_for_unpaired as tokenize_for_unpaired,
)
from .diagnostics.memory_table import memory_table as memory_table
from .distillation.classifier_teacher import build_classifier_teacher as build_classifier_teacher
from .distillation.on_policy import with_own_answers as with_own_answers
from .distillation.teacher import (
    build_teacher as build_teacher,
    keep_teacher as keep_teacher,
    load_student_tokenizer as load_student_tokenizer,
    update_teacher as update_teacher,
)
from .distributed.ranks import say_once as say_once
from .export.model_directory import save_model as save_model
from .generation.answered_questions import (
    answer_questions as answer_questions,
    sample_answers as sample_answers,
    sample_questions as sample_questions,
)
from .generation.distribution import SamplingSettings as SamplingSettings
from .generation.held_out_answers import answer_metrics as answer_metrics, held_out_prompts as held_out_prompts
from .generation.random_numbers import completion_key as completion_key
from .generation.sampler import sample_groups as sample_groups
from .generation.samples import sample_prompts as sample_prompts, sample_texts as sample_texts
from .generation.targets import sample_targets as sample_targets, target_metrics as target_metrics
from .losses.answer_logps import answer_logps as answer_logps, mismatched_logps as mismatched_logps, pair_logps as pair_logps
from .losses.causal_lm import (
    causal_lm_loss as causal_lm_loss,
    causal_lm_metrics as causal_lm_metrics,
    causal_lm_metrics_with_bytes as causal_lm_metrics_with_bytes,
)
from .losses.classification import (
    classification_task as classification_task,
    question_answering_loss as question_answering_loss,
    token_classification_loss as token_classification_loss,
)
from .losses.contrastive import embedding_task as embedding_task
from .losses.diffusion import diffusion_loss as diffusion_loss, diffusion_metrics as diffusion_metrics
from .losses.distillation import distillation_loss as distillation_loss, distillation_metrics as distillation_metrics
from .losses.divergences import TeacherLogps as TeacherLogps
from .losses.masked_lm import masked_lm_loss as masked_lm_loss, masked_lm_metrics as masked_lm_metrics
from .losses.matching import classifier_distillation_loss as classifier_distillation_loss
from .losses.policy import choose_kl as choose_kl, policy_loss as policy_loss
from .losses.preference import preference_loss as preference_loss, preference_metrics as preference_metrics
from .losses.ranking import (
    multiple_choice_loss as multiple_choice_loss,
    multiple_choice_metrics as multiple_choice_metrics,
    ranking_list_metrics as ranking_list_metrics,
    ranking_loss as ranking_loss,
)
from .losses.reward import reward_loss as reward_loss, reward_metrics as reward_metrics
from .losses.rollout_logps import logps_and_values as logps_and_values, rollout_logps as rollout_logps
from .losses.seq2seq import seq2seq_loss as seq2seq_loss, seq2seq_metrics as seq2seq_metrics
from .losses.unpaired import unpaired_loss as unpaired_loss, unpaired_metrics as unpaired_metrics
from .losses.value import value_loss as value_loss
from .metrics.classification import classification_metrics as classification_metrics
from .metrics.metric import Metrics as Metrics
from .metrics.question_answering import question_answering_metrics as question_answering_metrics
from .metrics.spans import tag_metrics as tag_metrics
from .metrics.text import choose_text_metrics as choose_text_metrics
from .models.added_heads import add_value_head as add_value_head
from .models.diffusion import load_diffusion_model as load_diffusion_model, load_diffusion_tokenizer as load_diffusion_tokenizer
from .models.encoder_decoder import decoder_start as decoder_start, set_target_language as set_target_language
from .models.fitted_tokenizer import pad_apart_from_end as pad_apart_from_end, space_before_words as space_before_words
from .models.load import load_model as load_model
from .models.lora import add_adapter as add_adapter
from .models.pooling import choose_text_layout as choose_text_layout, embed_texts as embed_texts, load_encoder as load_encoder
from .models.sentence_files import embedding_style as embedding_style, sentence_files as sentence_files
from .models.tokenizer import load_tokenizer as load_tokenizer, train_tokenizer as train_tokenizer
from .models.unpadded import choose_row_layout as choose_row_layout, choose_scored_pair_layout as choose_scored_pair_layout
from .optim.optimizers import build_optimizer as build_optimizer
from .optim.schedules import build_schedule as build_schedule
from .preference.pair_layouts import choose_answer_layout as choose_answer_layout, choose_pair_layout as choose_pair_layout
from .preference.reference import (
    build_reference as build_reference,
    estimate_kl as estimate_kl,
    keep_reference as keep_reference,
    reference_logps as reference_logps,
    sync_reference as sync_reference,
)
from .rollouts.advantages import (
    advantages as advantages,
    choose_advantages as choose_advantages,
    groups_with_spread as groups_with_spread,
    prompts_to_add as prompts_to_add,
    shaped_rewards as shaped_rewards,
    token_advantages as token_advantages,
)
from .rollouts.batches import collate_rollouts as collate_rollouts, policy_batches as policy_batches, with_logps as with_logps
from .rollouts.environments import load_environment as load_environment
from .rollouts.evaluation import sampled_reward_metrics as sampled_reward_metrics
from .rollouts.ledger import open_phase as open_phase, save_rollouts as save_rollouts
from .rollouts.overview import best_and_worst as best_and_worst, rollout_metrics as rollout_metrics
from .rollouts.rewards import Reward as Reward, load_rewards as load_rewards, rewards_made_of as rewards_made_of
from .rollouts.rollout import Rollout as Rollout
from .rollouts.sampling import sample_rollouts as sample_rollouts
from .rollouts.scoring import score_rollouts as score_rollouts
from .rollouts.server import connect_server as connect_server
from .rollouts.server_gap import correct_for_server as correct_for_server
from .rollouts.settings import in_prompts as in_prompts, sampling_settings as sampling_settings
from .runs.summary import Summary as Summary
from .sweeps.functions import FunctionTrial as FunctionTrial, Pruned as Pruned, sweep as sweep
from .system.interruptions import Interrupted as Interrupted
from .training.accelerator import build_accelerator as build_accelerator
from .training.contrastive import (
    cache_gradients as cache_gradients,
    cached_gradient_loss as cached_gradient_loss,
    trial_loss as trial_loss,
)
from .training.evaluation import (
    eval_with_gather as eval_with_gather,
    load_best as load_best,
    stopped_improving as stopped_improving,
)
from .training.memory import fit_micro_batch as fit_micro_batch
from .training.opening import open_run as open_run, save_to_hub as save_to_hub
from .training.run import Run as Run
from .training.step import (
    accumulate_gradients as accumulate_gradients,
    accumulate_micro_batch as accumulate_micro_batch,
    clip_and_update as clip_and_update,
    mean_metrics as mean_metrics,
    sum_over_ranks as sum_over_ranks,
    to_device as to_device,
    train_step as train_step,
)

__version__: str
