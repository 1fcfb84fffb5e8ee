"""What comes out of a run: a model directory that `from_pretrained` reads."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.data.tokenising.masks import turn_end_ids
from toolkit.tracking import show_number


def save_model(accelerator: Any, model: Any, tokenizer: Any, config: Any, summary: Any = None) -> Path:
    """Write the trained model, its tokenizer and a model card to `output_dir/model` and return that directory.

    It is written beside and then takes its place whole: a reader sees the old model or the new one. Without an accelerator
    (None) the model is taken as it is.
    """
    directory = Path(config.output_dir) / "model"
    if accelerator is None or accelerator.is_main_process:
        plain = model if accelerator is None else accelerator.unwrap_model(model)
        temporary, old = directory.with_name(".model.tmp"), directory.with_name(".model.old")
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
        if plain.can_generate():  # a chat ends its turn with a token of its own, which generate must know
            plain.generation_config.eos_token_id = turn_end_ids(tokenizer) or plain.generation_config.eos_token_id
        with _no_progress_bar():
            plain.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(model_card(config, summary), encoding="utf-8")
        if directory.exists():
            os.rename(directory, old)
        os.rename(temporary, directory)
        shutil.rmtree(old, ignore_errors=True)
    if accelerator is not None:
        accelerator.wait_for_everyone()
    return directory


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def model_card(config: Any, summary: Any = None) -> str:
    """A short model card: where the model comes from, what it was trained on, and its figures."""
    figures = {k: v for k, v in (summary.figures if summary else {}).items() if k.startswith("eval_") and isinstance(v, float)}
    rows = "".join(f"| {name.removeprefix('eval_')} | {show_number(value)} |\n" for name, value in figures.items())
    table = f"\n## Evaluation\n\n| metric | held out |\n| --- | --- |\n{rows}" if rows else ""
    base = "" if config.model.startswith("tiny-") else f"base_model: {config.model}\n"
    return (
        f"---\n{base}library_name: transformers\n---\n\n# {Path(config.output_dir).name}\n\n"
        f"Trained from `{config.model}` on `{config.dataset}` with a learning rate of {config.learning_rate}, "
        f"seed {config.seed}. The settings are in `config.yaml` of the run.\n{table}"
    )
