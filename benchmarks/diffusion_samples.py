"""How often Python that a masked-diffusion model writes can be parsed, next to what an n-gram of the same data writes.

    python benchmarks/diffusion_samples.py --folder /tmp/diffusion

The model is that of `recipes/diffusion.py` without an argument, which runs first where the folder has none. Both write texts
of as many tokens from nothing: the model finds out that many mask tokens, the n-gram begins as a document does and draws each
token from all that followed the last n - 1 ones in the training data (where they are not, the last n - 2). Of a text the last
line, which was cut, is left out, and so is the indentation that all lines have. It counts as right where `ast.parse` takes the
rest and finds a statement there that is more than a name, a number or a text. `lines` are whole lines in the text.
"""

import argparse
import ast
import math
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

RECIPE = Path(__file__).resolve().parents[1] / "recipes/diffusion.py"


def parses(text: str) -> bool:
    try:
        body = ast.parse(textwrap.dedent(whole_lines(text))).body
    except (SyntaxError, ValueError):
        return False
    return any(not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Name | ast.Constant)) for each in body)


def whole_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1].lstrip("\n")


def training_tokens(tokenizer: Any, folder: Path) -> np.ndarray:
    """The documents that the recipe trained on, one behind the other."""
    import toolkit as tk

    config = runpy.run_path(str(RECIPE), run_name="recipe")["Config"](output_dir=str(folder))
    rows = tk.tokenize_for_diffusion(tk.load_splits(config), tokenizer, config)["train"]
    return np.concatenate([np.asarray(tokens) for tokens in rows["input_ids"]])


def of_ngrams(train: np.ndarray, order: int, end: int, count: int, length: int) -> list[list[int]]:
    """Texts whose tokens follow each other as in the training data."""
    random_numbers, texts = np.random.default_rng(0), []
    following = [_places(train, size) for size in range(order)]
    for _ in range(count):
        text = [end]
        for _ in range(length):
            size = min(order - 1, len(text))
            while tuple(text[len(text) - size :]) not in following[size]:
                size -= 1
            places = following[size][tuple(text[len(text) - size :])]
            text.append(int(train[places[random_numbers.integers(len(places))]]))
        texts.append(text[1:])
    return texts


def _places(train: np.ndarray, size: int) -> dict[tuple[int, ...], list[int]]:
    """For each `size` tokens in a row the places behind them."""
    found: dict[tuple[int, ...], list[int]] = {}
    tokens = train.tolist()
    for place in range(size, len(tokens)):
        found.setdefault(tuple(tokens[place - size : place]), []).append(place)
    return found


def of_model(model: Any, end: int, count: int, length: int, temperature: float, block_length: int) -> list[list[int]]:
    from toolkit.generation.denoising import DenoisingSettings, denoise
    from toolkit.generation.random_numbers import completion_key
    from toolkit.models.diffusion import diffusion_of

    diffusion = diffusion_of(model)
    assert diffusion is not None
    settings = DenoisingSettings(block_length=block_length, temperature=temperature)
    keys = [int(completion_key(0, 0, number, 0)) for number in range(count)]
    texts = denoise(model, [[end] + [diffusion.mask_token_id] * length] * count, keys, diffusion, settings)
    return [text[1:] for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64])
    given = parser.parse_args()
    if not (given.folder / "model").is_dir():
        subprocess.run([sys.executable, str(RECIPE), "--output-dir", str(given.folder), "--use-cpu"], check=True)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.folder / "model")
    model = AutoModelForCausalLM.from_pretrained(given.folder / "model").eval()
    train, end = training_tokens(tokenizer, given.folder), tokenizer.eos_token_id
    print(f"{len(train):,} training tokens")
    print("| tokens | written by | parsed | standard error | lines | first that is parsed |")
    print("| --- | --- | --- | --- | --- | --- |")
    for length in given.tokens:
        written = {f"{order}-gram": of_ngrams(train, order, end, given.texts, length) for order in (2, 3)}
        for temperature in (0.7, 1.0):
            for block in sorted({min(32, length), 4}):
                name = f"diffusion, temperature {temperature}, blocks of {block}"
                written[name] = of_model(model, end, given.texts, length, temperature, block)
        for name, ids in written.items():
            texts = [tokenizer.decode([token for token in each if token != end]) for each in ids]
            right = [text for text in texts if parses(text)]
            share = len(right) / len(texts)
            lines = sum(whole_lines(text).count("\n") for text in texts) / len(texts)
            shown = repr(whole_lines(right[0]))[:60].replace("|", "\\|") if right else ""
            error = math.sqrt(share * (1 - share) / len(texts))
            print(f"| {length} | {name} | {share:.1%} | {error:.1%} | {lines:.1f} | `{shown}` |", flush=True)


if __name__ == "__main__":
    main()
