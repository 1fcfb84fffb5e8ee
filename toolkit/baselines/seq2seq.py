"""What an encoder-decoder must beat: targets that are guessed without a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from toolkit.metrics.text import choose_text_metrics, compare_texts, usual_text_metrics

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Splits = Mapping[str, "Dataset"]
SAMPLE = 30  # each is compared with each: 0.6 s of ROUGE, of 100 targets 8 s


def copy_baselines(
    tokenized: Splits, tokenizer: PreTrainedTokenizerBase, metric: str, source_prefix: str | None = None
) -> dict[str, float]:
    """A metric of texts on the validation split where the target is guessed without a model: the whole source, or its first
    line, or the one target of the training split that is most like the others of a sample of 30.

    Nothing without a validation split, for a stream, or where the metric is none of those built in that are installed.
    """
    if "validation" not in tokenized or not all(hasattr(tokenized[name], "__len__") for name in ("train", "validation")):
        return {}
    names = [name for name in usual_text_metrics()[0] if metric.startswith(name)]
    if not names:
        return {}
    held_out, train = tokenized["validation"], tokenized["train"]
    ids = [row[:cut] for row, cut in zip(held_out["input_ids"], held_out["source_tokens"], strict=True)]
    sources = [text.removeprefix(source_prefix or "") for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    few = [train[(2 * i + 1) * len(train) // (2 * SAMPLE)]["target"] for i in range(SAMPLE)]
    metrics, references = choose_text_metrics(names), list(held_out["target"])

    def score(said: list[str], wanted: list[str]) -> float:
        return compare_texts(metrics, said, wanted)[metric]

    usual = max(dict.fromkeys(few), key=lambda text: score([text] * len(few), few))
    guesses = {
        "copy of the source": sources,
        "first line of the source": [text.strip().partition("\n")[0] for text in sources],
        "one target for all": [usual] * len(references),
    }
    return {name: score(said, references) for name, said in guesses.items()}
