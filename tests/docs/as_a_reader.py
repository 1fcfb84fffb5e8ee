"""What a reader types, at a tiny width: recipes get the flags below wherever the reader's own command line has none of them.

Run by `conftest.py` in a forked process, with the path of its `python` and then that Python's arguments.
"""

import os
import re
import runpy
import sys
from pathlib import Path

# With a model, or a config file that names one, its width is fixed.
SHAPE = {"hidden_size": "32", "num_hidden_layers": "1"}
RANGE = {**SHAPE, "max_length": "128", "max_train_examples": "800"}  # of find-learning-rate, which trains 100 steps itself
TINY = {"max_steps": "2", "max_train_examples": "64", "max_eval_examples": "8", "max_length": "128", "num_samples": "0"}


def tiny_flags(script: str, words: list[str]) -> list[str]:
    """The flags that make a recipe's run tiny, but for those given; none for help, and none in a SageMaker job, which has its own."""
    text = Path(script).read_text(encoding="utf-8") if script.endswith(".py") else ""
    is_recipe, is_range = "run_recipe(main)" in text, words[:1] == ["find-learning-rate"]
    if not (is_recipe or is_range) or "--help" in words or "SM_HPS" in os.environ:
        return []
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words}
    wanted = dict(TINY) if given & {"model", "config"} else TINY | SHAPE
    if is_range:
        wanted = RANGE
    elif given & {"eval_fraction", "eval_strategy"}:  # perhaps no evaluation, with which the setting is refused
        del wanted["max_eval_examples"]
    if not {"SampleConfig", "RolloutConfig"} & set(re.findall(r"\w+", text)):
        wanted = {name: value for name, value in wanted.items() if name != "num_samples"}
    return [word for name, value in wanted.items() if name not in given for word in ("--" + name.replace("_", "-"), value)]


if __name__ == "__main__":
    target, *words = sys.argv[2:]
    sys.argv += tiny_flags(target, words)
    runpy.run_path(str(Path(__file__).parents[1] / "as_python.py"), run_name="__main__")
