"""The settings of prompts: what completions are sampled for."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.setting import Settings, setting


@dataclass(frozen=True)
class PromptConfig(Settings):
    """Prompts"""

    max_prompt_length: int = setting(512, "Longest prompt, in tokens.", least=1, most=2**24, on_resume="fixed")
    overlong_prompts: str = setting(
        "drop", "What to do with longer prompts, which are never cut: drop, each counted; or refuse.",
        choices=("drop", "refuse"), on_resume="fixed",
    )
