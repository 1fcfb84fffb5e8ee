"""The settings of rollouts: how many completions a prompt gets, how and where they are drawn, how often they are trained on."""

# ruff: noqa: RUF009 - setting() makes a dataclass field; ruff takes it for a default that all instances share

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.setting import Settings, setting


@dataclass(frozen=True)
class RolloutServerConfig(Settings):
    """Server that samples"""

    rollout_server: str | None = setting(
        None, "Address of a server of vLLM's completions API that samples in place of the trained model, such as "
        "http://localhost:8000.", aliases=("vllm_server_base_url",), on_resume="free",
    )
    rollout_server_model: str | None = setting(
        None, "Name of the model there. Default: the first that it lists.", on_resume="free"
    )
    rollout_server_reload: str | None = setting(
        None, "Address that is sent {weights_path, policy_version} to load weights. Default: vLLM's own.", on_resume="free"
    )
    rollout_server_requests: int = setting(
        32, "Prompts that each process requests at a time.", least=1, most=4096, on_resume="free"
    )
    rollout_server_timeout: float = setting(
        600.0, "Seconds until a request is given up and sent again.", above=0.0, most=86_400.0, on_resume="free"
    )
    rollout_server_retries: int = setting(
        5, "How often a request is sent again that failed by the connection, the server (5xx) or its load (429).", least=0,
        most=100, on_resume="free",
    )
    rollout_server_wait: float = setting(
        240.0, "Seconds to wait for the server when the run starts.", least=0.0, most=86_400.0,
        aliases=("vllm_server_timeout",), on_resume="free",
    )
    rollout_server_max_gap: float = setting(
        0.1, "Mean difference of a token's log-probability, server and trained model, nats, above which a step is refused.",
        above=0.0, on_resume="free",
    )


@dataclass(frozen=True)
class RolloutConfig(RolloutServerConfig):
    """Rollouts"""

    num_generations: int = setting(
        8, "Completions of a prompt, its group. per_device_train_batch_size counts completions.", least=1, most=2**16,
        aliases=("rloo_k",), on_resume="fixed",
    )
    max_completion_length: int = setting(
        256, "Longest completion, in tokens.", least=1, most=2**24, aliases=("response_length",), on_resume="fixed"
    )
    temperature: float = setting(1.0, "Temperature that completions are drawn at.", above=0.0, on_resume="fixed")
    top_k: int = setting(0, "Draw from the k most probable tokens alone; 0: from all.", least=0, on_resume="fixed")
    top_p: float = setting(
        1.0, "Draw from the most probable tokens alone whose probabilities add up to this.", above=0.0, most=1.0,
        on_resume="fixed",
    )
    min_p: float = setting(
        0.0, "Draw from tokens alone that are at least this probable, as a share of the most probable one.", least=0.0,
        most=1.0, on_resume="fixed",
    )
    stop_strings: list[str] = setting([], "Texts that end a completion.", on_resume="fixed")
    steps_per_generation: int = setting(
        1, "Updates that the rollouts of a step are split into, one behind the other.", least=1, most=1024, on_resume="fixed"
    )
    num_iterations: int = setting(
        1, "How often the rollouts of a step are trained on.", least=1, most=1024, aliases=("num_ppo_epochs",),
        on_resume="fixed",
    )
    mask_truncated_completions: bool = setting(
        False, "Leave completions without an end out of the loss.", on_resume="fixed"
    )
    rollouts_from: str | None = setting(
        None, "Output directory of a run with the same model, data and settings: its rollouts are taken, not sampled again.",
        on_resume="free",
    )
    rollouts_total_limit: int | None = setting(
        None, "Keep the rollouts of the newest N steps in OUTPUT_DIR/rollouts; default: of all steps.", least=1,
        on_resume="free",
    )
    num_samples: int = setting(
        3, "Prompts whose best and worst completions are shown at each evaluation.", least=0, most=10**4, on_resume="free"
    )
    eval_temperature: float = setting(
        0.0, "Temperature of the one completion a prompt gets in evaluations; 0: greedy decoding.", least=0.0,
        on_resume="free",
    )
