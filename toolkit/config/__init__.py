"""Settings: what they are, which there are, and every rule about their values.

`groups` lists them, `setting` says what a setting is and checks one value, `values` reads values from text, YAML and JSON,
`rules` knows which values do not go together, `files` reads and writes config.yaml. Nothing here imports a heavy library.
"""

from toolkit.config.files import changed_settings, read_config_file, write_config_file
from toolkit.config.groups import (
    DataConfig,
    DevicesConfig,
    HubConfig,
    ModelConfig,
    OptimConfig,
    OutputConfig,
    RunConfig,
    SeedConfig,
    trained_model,
)
from toolkit.config.methods import (
    AdapterConfig,
    CausalLMConfig,
    ClassificationConfig,
    PairsConfig,
    PreferenceConfig,
    RankedAnswersConfig,
    ReferenceConfig,
    RewardConfig,
    SampleConfig,
    UnpairedConfig,
)
from toolkit.config.rules import check_together, implied_settings
from toolkit.config.setting import Refusal, Setting, Settings, check_value, check_values, setting, settings_of, show_value
from toolkit.config.values import read_values

__all__ = [
    "AdapterConfig", "CausalLMConfig", "ClassificationConfig", "DataConfig", "DevicesConfig", "HubConfig", "ModelConfig",
    "OptimConfig", "OutputConfig", "PairsConfig", "PreferenceConfig", "RankedAnswersConfig", "ReferenceConfig", "Refusal",
    "RewardConfig", "RunConfig", "SampleConfig", "SeedConfig", "Setting", "Settings", "UnpairedConfig", "changed_settings",
    "check_together", "check_value", "check_values",
    "implied_settings", "read_config_file", "read_values", "setting", "settings_of", "show_value", "trained_model",
    "write_config_file",
]  # fmt: skip
