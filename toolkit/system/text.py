"""Texts of any length in one line of the screen."""

import itertools


def own_ends(prompts: list[str], width: int) -> list[str]:
    """The end of each prompt, which tells it from others, before what all of them end with: a chat template's words."""
    ends = zip(*(reversed(prompt) for prompt in prompts), strict=False) if len(prompts) > 1 else ()
    alike = sum(1 for _ in itertools.takewhile(lambda characters: len(set(characters)) == 1, ends))
    return [one_line((prompt[: len(prompt) - alike] or prompt)[::-1], width)[::-1] for prompt in prompts]


def one_line(text: str, width: int) -> str:
    """A text without line breaks, cut to so many characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
