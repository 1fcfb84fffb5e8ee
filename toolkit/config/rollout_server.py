"""The settings of a server that samples in place of the trained model."""

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
