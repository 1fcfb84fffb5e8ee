# The public names, each with the file it is in, as in `toolkit/__init__.pyi`.

from .adapter import AdapterConfig as AdapterConfig
from .distillation import (
    ClassifierDistillationConfig as ClassifierDistillationConfig,
    DistillationConfig as DistillationConfig,
    TeacherConfig as TeacherConfig,
)
from .files import read_config_file as read_config_file, write_config_file as write_config_file
from .groups import (
    BatchConfig as BatchConfig,
    DataConfig as DataConfig,
    ModelConfig as ModelConfig,
    OptimConfig as OptimConfig,
    SeedConfig as SeedConfig,
    trained_model as trained_model,
)
from .policy import PolicyConfig as PolicyConfig, PPOConfig as PPOConfig
from .preferences import (
    PairsConfig as PairsConfig,
    PreferenceConfig as PreferenceConfig,
    RankedAnswersConfig as RankedAnswersConfig,
    ReferenceConfig as ReferenceConfig,
    RewardConfig as RewardConfig,
    UnpairedConfig as UnpairedConfig,
)
from .rollouts import RewardFunctionsConfig as RewardFunctionsConfig, RolloutConfig as RolloutConfig
from .rules import check_together as check_together, implied_settings as implied_settings
from .run_groups import (
    DeviceConfig as DeviceConfig,
    DevicesConfig as DevicesConfig,
    HubConfig as HubConfig,
    OutputConfig as OutputConfig,
    RunConfig as RunConfig,
)
from .setting import (
    Refusal as Refusal,
    Setting as Setting,
    Settings as Settings,
    changed_settings as changed_settings,
    setting as setting,
    settings_of as settings_of,
    show_value as show_value,
)
from .tasks import (
    AnswerConfig as AnswerConfig,
    CausalLMConfig as CausalLMConfig,
    ClassificationConfig as ClassificationConfig,
    DiffusionConfig as DiffusionConfig,
    EmbeddingConfig as EmbeddingConfig,
    GeneratedTextConfig as GeneratedTextConfig,
    LossConfig as LossConfig,
    MaskedLMConfig as MaskedLMConfig,
    PromptConfig as PromptConfig,
    QuestionAnsweringConfig as QuestionAnsweringConfig,
    RankingConfig as RankingConfig,
    RowsConfig as RowsConfig,
    SampleConfig as SampleConfig,
    Seq2SeqConfig as Seq2SeqConfig,
    TokenClassificationConfig as TokenClassificationConfig,
)
from .values import check_value as check_value, check_values as check_values, read_values as read_values
