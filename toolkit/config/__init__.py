"""Settings: what they are, which there are, and every rule about their values.

`setting` says what a setting is; `groups`, `tasks`, `preferences`, `adapter`, `policy` and others list them; `values` reads and
checks one value from text, YAML or JSON; `rules` puts the tables of what does not go together to a config; `files` reads and
writes config.yaml. Nothing here imports a heavy library.
"""

from toolkit.config.adapter import AdapterConfig
from toolkit.config.diffusion import DiffusionConfig
from toolkit.config.distillation import ClassifierDistillationConfig, DistillationConfig, TeacherConfig
from toolkit.config.files import read_config_file, write_config_file
from toolkit.config.groups import BatchConfig, DataConfig, ModelConfig, OptimConfig, SeedConfig, trained_model
from toolkit.config.policy import PolicyConfig, PPOConfig
from toolkit.config.preferences import (
    PairsConfig,
    PreferenceConfig,
    RankedAnswersConfig,
    ReferenceConfig,
    RewardConfig,
    UnpairedConfig,
)
from toolkit.config.prompts import PromptConfig
from toolkit.config.rewards import RewardFunctionsConfig
from toolkit.config.rollouts import RolloutConfig
from toolkit.config.rules import check_together, implied_settings
from toolkit.config.run_groups import DeviceConfig, DevicesConfig, HubConfig, OutputConfig, RunConfig
from toolkit.config.setting import Refusal, Setting, Settings, changed_settings, setting, settings_of, show_value
from toolkit.config.tasks import (
    AnswerConfig,
    CausalLMConfig,
    ClassificationConfig,
    EmbeddingConfig,
    GeneratedTextConfig,
    LossConfig,
    MaskedLMConfig,
    QuestionAnsweringConfig,
    RankingConfig,
    RowsConfig,
    SampleConfig,
    Seq2SeqConfig,
    TokenClassificationConfig,
)
from toolkit.config.values import check_value, check_values, read_values

__all__ = [
    "AdapterConfig",
    "AnswerConfig",
    "BatchConfig",
    "CausalLMConfig",
    "ClassificationConfig",
    "ClassifierDistillationConfig",
    "DataConfig",
    "DeviceConfig",
    "DevicesConfig",
    "DiffusionConfig",
    "DistillationConfig",
    "EmbeddingConfig",
    "GeneratedTextConfig",
    "HubConfig",
    "LossConfig",
    "MaskedLMConfig",
    "ModelConfig",
    "OptimConfig",
    "OutputConfig",
    "PPOConfig",
    "PairsConfig",
    "PolicyConfig",
    "PreferenceConfig",
    "PromptConfig",
    "QuestionAnsweringConfig",
    "RankedAnswersConfig",
    "RankingConfig",
    "ReferenceConfig",
    "Refusal",
    "RewardConfig",
    "RewardFunctionsConfig",
    "RolloutConfig",
    "RowsConfig",
    "RunConfig",
    "SampleConfig",
    "SeedConfig",
    "Seq2SeqConfig",
    "Setting",
    "Settings",
    "TeacherConfig",
    "TokenClassificationConfig",
    "UnpairedConfig",
    "changed_settings",
    "check_together",
    "check_value",
    "check_values",
    "implied_settings",
    "read_config_file",
    "read_values",
    "setting",
    "settings_of",
    "show_value",
    "trained_model",
    "write_config_file",
]  # fmt: skip
