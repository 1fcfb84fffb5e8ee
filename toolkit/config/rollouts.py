"""The settings of rollouts: how many completions a prompt gets, how they are drawn, scored and trained on."""

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
    mask_truncated_completions: bool = setting(False, "Leave completions without an end out of the loss.", on_resume="fixed")
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
        0.0, "Temperature of the one completion a prompt gets in evaluations; 0: greedy decoding.", least=0.0, on_resume="free"
    )


@dataclass(frozen=True)
class RewardFunctionsConfig(Settings):
    """Rewards"""

    reward_funcs: list[str] = setting(
        [], "What scores completions; several are added. module:function or file.py:function, a directory of "
        "recipes/reward.py, or exact_match, number, regex, json_schema, length, python.", on_resume="fixed",
    )
    reward_weights: list[float] = setting([], "Weight of each of them. Default: 1 each.", on_resume="fixed")
    on_reward_error: str = setting(
        "stop", "When a reward function raises, exceeds its time or returns a value that is not finite: stop the run, or skip "
        "this value, which then counts nowhere.", choices=("stop", "skip"), on_resume="free",
    )
    reward_timeout: float | None = setting(
        None, "Seconds that a function may take for the completions of one prompt; python: CPU seconds of one completion's "
        "code. Default: 60; python: 5.", above=0.0, most=86_400.0, on_resume="free",
    )
    reward_processes: int = setting(
        1, "Processes on each rank that functions run in. 0: the training process, where only async ones have a time limit.",
        least=0, most=1024, on_resume="free",
    )
    reward_output: str = setting(
        "show", "What functions write to the screen: show it, each line with the function's name, or hide it.",
        choices=("show", "hide"), on_resume="free",
    )
    environment: str | None = setting(
        None, "What answers the turns of a completion, for tools and several turns: module:Class or file.py:Class with "
        "reset(row) and step(messages). Its rewards are added to those of reward_funcs.", on_resume="fixed",
    )
    max_turns: int = setting(
        8, "Turns of the policy in one completion with an environment.", least=1, most=1024, on_resume="fixed"
    )
    answer_column: str = setting("answer", "exact_match, number: the column with the right answer.", on_resume="fixed")
    reward_pattern: str | None = setting(
        None, "regex: what a completion must hold, searched in all of it. Default: the row's column pattern.", on_resume="fixed"
    )
    reward_schema: str | None = setting(
        None, "json_schema: a file with the JSON schema. Default: the row's column schema.", is_path=True, on_resume="fixed"
    )
    reward_length: int | None = setting(
        None, "length: tokens up to which a completion is worth 0; from there it falls in a line to -1 at twice as many.",
        least=1, most=2**24, on_resume="fixed",
    )
    reward_memory: int = setting(
        512, "python: MiB of memory that a completion's code may have.", least=64, most=2**20, on_resume="fixed"
    )
