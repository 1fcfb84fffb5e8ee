"""How often Python that a masked-diffusion model writes can be parsed, next to what an n-gram of the same data writes.

    python benchmarks/diffusion_samples.py --folder /tmp/diffusion

The model is that of `recipes/diffusion.py` without an argument, which runs first where the folder has none. An n-gram draws
each token from all that followed the last n - 1 ones in the training data (where they are not, the last n - 2). Both write

- texts from nothing: the model finds out as many mask tokens, the n-gram begins as a document does. Of a text the last line,
  which was cut, is left out, and so is the indentation that all lines have. It has a `statement` where it can be parsed and
  holds more than names, numbers, texts and comments.
- what is missing in a gap of held-out functions, at a random place: the n-gram goes on from the left, the model sees both
  sides.
"""

import argparse
import ast
import math
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

RECIPE = Path(__file__).resolve().parents[1] / "recipes/diffusion.py"
LONGEST = 128  # tokens of a function: what the recipe's rows have

Places = list[dict[tuple[int, ...], list[int]]]  # by how many tokens: these in a row, and the places behind them


def parsed(text: str) -> list[ast.stmt] | None:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError):
        return None


def whole_lines(text: str) -> str:
    return textwrap.dedent(text[: text.rfind("\n") + 1].lstrip("\n"))


def is_statement(node: ast.stmt) -> bool:
    return not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Name | ast.Constant))


def places_of(train: list[int], order: int) -> Places:
    found: Places = [{} for _ in range(order)]
    for place in range(len(train)):
        for size in range(min(order, place + 1)):
            found[size].setdefault(tuple(train[place - size : place]), []).append(place)
    return found


def by_ngrams(train: list[int], places: Places, texts: Sequence[Sequence[int]], mask: int) -> list[list[int]]:
    """The texts with their hidden tokens drawn, from left to right."""
    random_numbers, found = np.random.default_rng(0), []
    for text in texts:
        written: list[int] = []
        for token in text:
            if token == mask:
                size = min(len(places) - 1, len(written))
                while tuple(written[len(written) - size :]) not in places[size]:
                    size -= 1
                following = places[size][tuple(written[len(written) - size :])]
                token = train[following[random_numbers.integers(len(following))]]
            written.append(token)
        found.append(written)
    return found


def by_model(model: Any, texts: Sequence[Sequence[int]], temperature: float) -> list[list[int]]:
    from toolkit.generation.denoising import DenoisingSettings, denoise
    from toolkit.generation.random_numbers import completion_key
    from toolkit.models.diffusion import diffusion_of

    diffusion, found = diffusion_of(model), list[list[int]]()
    assert diffusion is not None
    for start in range(0, len(texts), 50):
        some = texts[start : start + 50]
        keys = [int(completion_key(0, 0, start + number, 0)) for number in range(len(some))]
        found += denoise(model, some, keys, diffusion, DenoisingSettings(temperature=temperature))
    return found


def functions(sources: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of whole functions, without their indentation, of 48 tokens or more."""
    found = []
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                lines = source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
                ids = tokenizer(textwrap.dedent("".join(lines)), add_special_tokens=False)["input_ids"]
                found += [ids] if 48 <= len(ids) < LONGEST and parsed(tokenizer.decode(ids)) else []
    return found


def with_gap(ids: list[int], size: int, mask: int, random_numbers: np.random.Generator) -> list[int]:
    place = int(random_numbers.integers(8, len(ids) - size))
    return [*ids[:place], *[mask] * size, *ids[place + size :]]


def show(task: str, name: str, texts: list[str]) -> None:
    right = [text for text in texts if parsed(text) is not None]
    shares = [len(right) / len(texts), sum(any(map(is_statement, parsed(text) or [])) for text in right) / len(texts)]
    cells = [f"{share:.1%} ({math.sqrt(share * (1 - share) / len(texts)):.1%})" for share in shares]
    lines = sum(text.count("\n") for text in texts) / len(texts)
    print(f"| {task} | {name} | {' | '.join(cells)} | {lines:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=500)
    given = parser.parse_args()
    if not (given.folder / "model").is_dir():
        subprocess.run([sys.executable, str(RECIPE), "--output-dir", str(given.folder), "--use-cpu"], check=True)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    import toolkit as tk

    tokenizer = AutoTokenizer.from_pretrained(given.folder / "model")
    model = AutoModelForCausalLM.from_pretrained(given.folder / "model").eval()
    config = runpy.run_path(str(RECIPE), run_name="recipe")["Config"](output_dir=str(given.folder))
    raw = tk.load_splits(config)
    rows = tk.tokenize_for_diffusion(raw, tokenizer, config)["train"]["input_ids"]
    train = [token for row in rows for token in row]
    places, mask, end = places_of(train, 3), tokenizer.mask_token_id, tokenizer.eos_token_id
    held_out = functions(raw["validation"]["text"], tokenizer)
    random_numbers = np.random.default_rng(1)
    chosen = [held_out[number] for number in random_numbers.permutation(len(held_out))[: given.texts]]
    tasks = {f"{size} tokens from nothing": [[end] + [mask] * size] * given.texts for size in (16, 32)}
    tasks |= {f"a gap of {size}": [with_gap(ids, size, mask, random_numbers) for ids in chosen] for size in (1, 4, 16)}
    print(f"{len(train):,} training tokens, {len(chosen)} held-out functions of {len(held_out)}")
    print("| task | written by | parsed (standard error) | a statement | lines |\n| --- | --- | --- | --- | --- |")
    for task, texts in tasks.items():
        written = {f"{order}-gram": by_ngrams(train, places[:order], texts, mask) for order in (2, 3)}
        written |= {f"diffusion, temperature {degrees}": by_model(model, texts, degrees) for degrees in (0.0, 0.7, 1.0)}
        for name, found in written.items():
            decoded = [tokenizer.decode([token for token in ids if token != end]) for ids in found]
            show(task, name, [whole_lines(text) for text in decoded] if "nothing" in task else decoded)


if __name__ == "__main__":
    main()
