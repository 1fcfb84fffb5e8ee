"""The settings groups of a run: where it writes, on which devices, when it saves, what it sends to the Hub, how it goes on."""

# ruff: noqa: RUF009 - setting() makes a dataclass field; ruff takes it for a default that all instances share

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.groups import IncidentConfig, SeedConfig
from toolkit.config.setting import Settings, setting

A_YEAR = 365 * 86_400.0  # in seconds


@dataclass(frozen=True)
class OutputConfig(Settings):
    """Output"""

    output_dir: str = setting("runs/run", "Where everything of this run is written.", is_path=True, on_resume="free")
    overwrite_output_dir: bool = setting(False, "Throw away a run that is already in output_dir.", on_resume="free")
    logging_steps: int = setting(10, "Log every N steps.", least=1, most=10**12, on_resume="free")
    eval_steps: int = setting(100, "Evaluate every N steps.", least=1, most=10**12, on_resume="evaluation")
    save_steps: int = setting(500, "Write a checkpoint every N steps.", least=1, most=10**12, on_resume="free")


@dataclass(frozen=True)
class DeviceConfig(Settings):
    """Devices"""

    use_cpu: bool = setting(False, "Stay on the CPU even where there is an accelerator.", on_resume="rounding")


@dataclass(frozen=True)
class DevicesConfig(DeviceConfig):
    """Devices"""

    zero_stage: int | None = setting(
        None, "DeepSpeed ZeRO over all ranks: 1 shards the optimizer's state, 2 gradients as well, 3 parameters as well.",
        least=1, most=3, on_resume="free",
    )
    fsdp: bool = setting(False, "Shard parameters, gradients and optimizer state with torch's FSDP2.", on_resume="free")
    offload: str = setting(
        "none", "What of the shards waits in the CPU's memory. parameters: the optimizer's state as well.",
        choices=("none", "optimizer", "parameters"), on_resume="free",
    )
    deepspeed: str | None = setting(None, "Your own DeepSpeed configuration, such as ds_config.json.", on_resume="free")
    ddp_backend: str = setting(
        "auto", "How ranks communicate. auto: nccl between GPUs, gloo between CPUs.", choices=("auto", "nccl", "gloo", "mpi"),
        on_resume="rounding",
    )


@dataclass(frozen=True)
class HubConfig(Settings):
    """Hub"""

    push_to_hub: bool = setting(
        False, "Send the model to the Hugging Face Hub. Needs HF_TOKEN or a login that may write.", on_resume="free"
    )
    hub_model_id: str | None = setting(
        None, "Repository on the Hub, as user/name or name. Default: your user name and the output directory's name.",
        on_resume="free",
    )
    hub_strategy: str = setting(
        "every_save",
        "What is sent: the final model (end); also the model of each checkpoint (every_save); also the newest checkpoint, to "
        "resume from (checkpoint); or the best model so far (best).",
        choices=("end", "every_save", "checkpoint", "best"), on_resume="free",
    )
    hub_private_repo: bool | None = setting(
        None, "Make the repository private. Default: public, or as the organization has it.", on_resume="free"
    )
    hub_revision: str | None = setting(
        None, "Branch of the repository; it is made when it is missing. Default: main.", on_resume="free"
    )


@dataclass(frozen=True)
class RunConfig(OutputConfig, DevicesConfig, HubConfig, IncidentConfig, SeedConfig):
    """Run"""

    resume: bool = setting(
        False, "Continue from the newest valid checkpoint; start fresh where there is none.", on_resume="free"
    )
    resume_from: str | None = setting(None, "Continue from this checkpoint.", is_path=True, on_resume="free")
    allow_change: list[str] = setting(
        [], "With --resume: settings that may differ from the checkpoint's, though the result depends on them.",
        on_resume="free",
    )
    run_name: str | None = setting(
        None, "Name of the run in card, report and trackers. Default: the output directory's.", on_resume="free"
    )
    report_to: list[str] = setting(
        ["none"], "Trackers of the run.", choices=("wandb", "tensorboard", "trackio", "mlflow", "all", "none"), on_resume="free"
    )
    logging_strategy: str = setting("steps", "When to log.", choices=("no", "steps", "epoch"), on_resume="free")
    eval_strategy: str = setting(
        "epoch", "When to evaluate; at the end always unless no.", choices=("no", "steps", "epoch"), on_resume="evaluation"
    )
    eval_on_start: bool = setting(False, "Evaluate before the first step as well.", on_resume="free")
    eval_delay: float = setting(
        0.0, "No evaluation before N steps (epochs, with that strategy).", least=0.0, most=1e12, on_resume="evaluation"
    )
    save_strategy: str = setting("epoch", "When to write a checkpoint.", choices=("no", "steps", "epoch"), on_resume="free")
    save_total_limit: int | None = setting(
        2, "Checkpoints kept, next to the best one; none keeps all.", least=1, most=10**9, on_resume="free"
    )
    save_error: str = setting(
        "continue", "When a checkpoint can't be written: continue with a warning, or stop.", choices=("continue", "stop"),
        on_resume="free",
    )
    loss_spike: str = setting(
        "warn",
        "When the loss jumps far above those before: warn, or go back to the weights of the last checkpoint and pass over the "
        "rows of the steps since (rollback; on a GPU each step is then waited for).",
        choices=("warn", "rollback"), on_resume="free",
    )
    async_save: bool = setting(False, "Write checkpoints in the background, from a copy in memory.", on_resume="free")
    stop_deadline: float | None = setting(
        None, "Seconds from a stop signal to the end of the process. Default: 120 in a SageMaker job, else no limit.",
        above=0.0, most=A_YEAR, on_resume="free",
    )
    stop_at_step: int | None = setting(
        None, "Save a checkpoint after step N and stop, with exit code 75; schedules are those of the whole run.", least=1,
        most=10**9, on_resume="free",
    )
    hang_timeout: float = setting(
        300.0, "End the run when another rank has been silent for N seconds; before its first step, name it.",
        above=0.0, most=A_YEAR, on_resume="free",
    )
    load_best_model_at_end: bool = setting(
        False, "Go back to the best evaluated weights before the model is saved.", on_resume="free"
    )
    save_best_limit: int = setting(
        1, "Best checkpoints kept next to the newest ones, by metric_for_best_model. Needs --load-best-model-at-end.",
        least=1, most=10**9, on_resume="free",
    )
    metric_for_best_model: str = setting("eval_loss", "The evaluation metric that decides.", on_resume="evaluation")
    greater_is_better: bool | None = setting(
        None, "Whether more is better in that metric. Default: no for losses, errors and perplexities, yes otherwise.",
        on_resume="evaluation",
    )
    early_stopping_patience: int | None = setting(
        None, "Stop after N evaluations without a better metric.", least=1, most=10**9, on_resume="free"
    )
    bf16: bool | None = setting(
        None, "Compute in bfloat16 (autocast). Default: yes with --dtype float32 on a device where it is faster.",
        on_resume="rounding",
    )
    fp16: bool = setting(False, "Compute in float16 with loss scaling (autocast).", on_resume="rounding")
    fp8: str = setting(
        "none",
        "Products of the layers' matrices in 8-bit floats, over bf16, scaled by row (rowwise: rounds less) or by matrix "
        "(tensorwise: faster). Needs torchao and a GPU that has them; a CPU emulates them. Faster with --torch-compile alone.",
        choices=("none", "tensorwise", "rowwise"), on_resume="rounding",
    )
    tf32: bool | None = setting(None, "TF32 matrix products on CUDA. Default: torch's.", on_resume="rounding")
    full_determinism: bool = setting(
        False, "The same bits in every run on CUDA: deterministic algorithms, slower. On a CPU they are the same anyway.",
        on_resume="rounding",
    )
