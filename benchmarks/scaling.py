"""How the time and the memory of supervised fine-tuning grow, ours next to TRL's best flags, one thing changed at a time.

    python benchmarks/scaling.py                      on a CPU, about an hour
    python benchmarks/scaling.py --axes layers ranks

The model is the body-heavy one of `side_by_side.py`, 12 layers, 512 wide, 4,096 tokens; texts are of 150 tokens in the median,
packed into rows of 512, half of each the prompt; eight to a step. Seconds are CPU seconds of training, of all ranks together.
"""

import argparse
from types import SimpleNamespace
from typing import Any, NamedTuple

import sft
from side_by_side import BEST, ITS_FLOOR, OURS, circumstances, runs


class Point(NamedTuple):
    """One place on an axis: what is changed."""

    label: str
    shape: str = ""  # settings of the shape
    batch: int = 8
    examples: int = 32
    ranks: int = 1
    sides: tuple[str, ...] = (OURS, OURS + ITS_FLOOR, BEST)


def at_once(number: int) -> str:
    return f"{OURS}, rows at once: {number}"


AXES = {
    "median tokens of a text": [
        Point(str(tokens), f"median_tokens={tokens},longest={4 * tokens}", examples=max(8, 4800 // tokens))
        for tokens in (40, 150, 600)
    ],
    "documents in a row": [  # rows of 512
        Point(str(512 // tokens), f"median_tokens={tokens},longest=512", batch=1200 // tokens, examples=4800 // tokens)
        for tokens in (25, 75, 300)
    ],
    "vocabulary": [Point(f"{size:,}", f"vocab_size={size}") for size in (4_096, 32_768, 131_072)],
    "layers": [Point(str(layers), f"num_hidden_layers={layers}") for layers in (3, 12, 24)],
    "texts in a step": [Point(str(texts), batch=texts, examples=4 * texts) for texts in (2, 8, 32)],
    "packed rows in a micro-batch, of 32 texts in a step": [
        Point(str(number), batch=32, examples=64, sides=(at_once(number),)) for number in (1, 2, 4, 8)
    ],
    "ranks": [Point(str(ranks), batch=32, examples=64, ranks=ranks, sides=(at_once(2),)) for ranks in (1, 2)],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=[*AXES], default=[*AXES])
    settings = parser.parse_args()
    for axis in settings.axes:
        print(f"\n| {axis} | side | supervised tokens / CPU s | CPU seconds | peak GB |\n| --- | --- | --- | --- | --- |")
        for point in AXES[axis]:
            for side in point.sides:
                print(_line(point, side), flush=True)
    shown = SimpleNamespace(examples="each axis its own", batch="8 where it has no number of its own", device="cpu", threads=1)
    print(f"\n{circumstances(shown)}")


def _line(point: Point, side: str) -> str:
    cell = ",".join(filter(None, ("body-heavy", point.shape))) + ":1:1"
    how = SimpleNamespace(device="cpu", threads=1, ranks=point.ranks, batch=point.batch, examples=point.examples)
    with runs(sft.COMPARISON, cell, how) as measured:
        found: list[dict[str, Any]] = measured(side)
    if not found:
        return f"| {point.label} | {side} | failed | | |"
    seconds, peak = point.ranks * found[0]["seconds"], found[0].get("peak GB")
    memory = f"{peak:.2f}" if peak else ""
    return f"| {point.label} | {side} | {found[0]['supervised tokens'] / seconds:.0f} | {seconds:.2f} | {memory} |"


if __name__ == "__main__":
    main()
