"""The settings group of adapters: LoRA, its relatives, and 4-bit weights below it."""

# ruff: noqa: RUF009 - setting() makes a dataclass field; ruff takes it for a default that all instances share

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.setting import Settings, setting


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
        [], "Tokens that learn their own embedding. template: those that the chat template writes, which a base model "
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
