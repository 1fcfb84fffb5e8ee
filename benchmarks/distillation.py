"""Does a teacher help? A small student that learns from one, next to the same student trained on the data alone.

    python benchmarks/distillation.py --folder /tmp/distillation

Both students have the same seed, rows, order, steps and settings; `recipes/sft.py` trains the one, `recipes/distill.py` the
other, whose first run trains the teacher. Prints the loss on held-out rows for each seed, and mean and spread over the seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
ALONE = [
    "--model", "nano-llama", "--dataset", "stdlib:pretrain", "--overlong", "split", "--max-length", "256",
    "--learning-rate", "5e-3", "--min-lr-ratio", "0.05", "--warmup-steps", "0.02",
]  # fmt: skip


def held_out_loss(recipe: str, folder: Path, name: str, flags: list[str]) -> dict[str, float]:
    """The summary of a run; of one that is there already, without running it again."""
    summary = folder / name / "summary.json"
    if not summary.exists():
        command = [sys.executable, str(RECIPES / f"{recipe}.py"), "--output-dir", str(folder / name), *flags]
        with open(folder / f"{name}.log", "w") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True, timeout=7200)
    return json.loads(summary.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", default="400")
    parser.add_argument("flags", nargs="*", help="further flags of the distillation, after --")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    losses: dict[str, list[float]] = {"alone": [], "distilled": []}
    silent = ["--max-steps", given.steps, "--eval-steps", given.steps, "--no-eval-on-start", "--num-samples", "0", "--use-cpu"]
    silent += ["--save-strategy", "no"]
    for seed in range(1, given.seeds + 1):
        teacher = [] if seed == 1 else ["--teacher", str(given.folder / "distilled-1-teacher")]
        flags = [*silent, "--seed", str(seed)]
        distilled = held_out_loss("distill", given.folder, f"distilled-{seed}", [*flags, *teacher, *given.flags])
        alone = held_out_loss("sft", given.folder, f"alone-{seed}", [*flags, *ALONE])
        losses["distilled"].append(distilled["eval_loss"])
        losses["alone"].append(alone["eval_loss"])
        found = {"alone": alone["eval_loss"], "distilled": distilled["eval_loss"], "kl": distilled["eval_kl"]}
        print(f"seed {seed}:", "  ".join(f"{name} {value:.4f}" for name, value in found.items()), flush=True)
    for name, all_of in losses.items():
        print(f"{name}: mean {statistics.mean(all_of):.4f}, {min(all_of):.4f} to {max(all_of):.4f}")


if __name__ == "__main__":
    main()
