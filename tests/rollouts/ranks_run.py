"""Scores rollouts on each of some ranks: a function in processes, one here, and a reward model; each rank writes what it has.

    python tests/rollouts/ranks_run.py --output-dir /tmp/run --reward-funcs FILE:FUNCTION,DIRECTORY
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import toolkit as tk

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.RewardFunctionsConfig, tk.RunConfig):
    pass


def main(config: Config) -> None:
    from tests.rollouts.rollouts_of import rollouts_of

    accelerator = tk.build_accelerator(config)
    groups = [({"prompt": f"p{n}", "answer": str(n)}, [f"{'x' * n}{m}" for m in range(1 + n % 3)]) for n in range(7)]
    calls = Path(config.output_dir, f"calls-{accelerator.process_index}.txt")
    os.environ["CALLS"] = str(calls)
    calls.parent.mkdir(parents=True, exist_ok=True)
    rewards = tk.load_rewards(config)
    scored = tk.score_rollouts(rollouts_of(groups), rewards, accelerator, on_error=config.on_reward_error)
    Path(config.output_dir, f"scored-{accelerator.process_index}.json").write_text(json.dumps([asdict(each) for each in scored]))


if __name__ == "__main__":
    tk.run_recipe(main)
