"""What safety costs: how long training waits for a checkpoint written in the background, and what the guards add to a step.

    python benchmarks/saving.py --megabytes 150

The state is a model with AdamW's moments. A save that training waits for is compared with what training waits for one in
the background; to both belongs the look at whether every parameter is finite. The guards of a step are what `train_step`
does before an update: loss and gradient norm are looked at. They are timed alone: two timings of a step differ by more.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn


def parts(megabytes: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer of this many megabytes together, after one step."""
    width = round((megabytes * 1e6 / 4 / 3 / 8) ** 0.5)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_times(megabytes: float, times: int) -> dict[str, list[float]]:
    """Seconds that training waits for each save, by way of saving; the first of each is left out."""
    from toolkit import checkpoint as ckpt

    model, optimizer = parts(megabytes)
    waited: dict[str, list[float]] = {name: [] for name in ("plain torch.save", "synchronous", "background", "look alone")}
    with tempfile.TemporaryDirectory() as folder:
        both = {"synchronous": False, "background": True}
        writers = {name: ckpt.CheckpointWriter(Path(folder, name), 1, background=way) for name, way in both.items()}
        print(f"state: {ckpt.capture_state(model, optimizer, {}).size / 1e6:.0f} MB")
        for step in range(times + 1):
            for name in waited:
                began = time.perf_counter()
                if name == "plain torch.save":
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder, "plain.pt"))
                else:
                    state = ckpt.capture_state(model, optimizer, {})
                    assert ckpt.nonfinite_parameter(state) is None
                    if name in writers:
                        writers[name].save(step, state)
                if step:
                    waited[name].append(time.perf_counter() - began)
                if name == "background":  # training goes on meanwhile; here the next way's timing must not suffer
                    problems = [outcome.error for outcome in writers[name].wait() if outcome.error]
                    assert not problems, problems
    return waited


def step_times(times: int, width: int, layers: int, length: int) -> tuple[list[float], list[float]]:
    """Seconds of a step of a small Llama, and of its guards."""
    import numpy as np
    from accelerate import Accelerator
    from datasets import Dataset, DatasetDict

    import toolkit as tk

    random_numbers = np.random.default_rng(0)
    ids = [random_numbers.integers(1, 1000, size=length).tolist() for _ in range(64)]
    rows = {"input_ids": ids, "length": [length] * 64, "supervised_tokens": [length - 1] * 64}
    shape = tk.ModelConfig(model="tiny-llama", hidden_size=width, num_hidden_layers=layers, vocab_size=1000)
    model = tk.load_model("AutoModelForCausalLM", shape)
    accelerator = Accelerator(cpu=True)
    settings = tk.DataConfig(per_device_train_batch_size=4, max_steps=times)
    train, _ = tk.build_dataloaders(DatasetDict(train=Dataset.from_dict(rows)), tk.collate_padded, settings, accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    whole, guards = [], []
    for batch in train.batches():
        began = time.perf_counter()
        metrics = tk.train_step(accelerator, model, optimizer, batch, tk.causal_lm_loss, [1e-4])
        whole.append(time.perf_counter() - began)
        loss, norm = metrics["loss"], metrics["grad_norm"]
        began = time.perf_counter()
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        assert bool(finite)
        _ = (finite.float(), (~finite).float())
        guards.append(time.perf_counter() - began)
    return whole, guards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=150)
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    waited = {name: statistics.median(values) for name, values in save_times(arguments.megabytes, arguments.saves).items()}
    for name, seconds in waited.items():
        print(f"{name:18}{1000 * seconds:9.1f} ms that training waits (median of {arguments.saves})")
    print(f"background waits {100 * waited['background'] / waited['synchronous']:.1f} % of a synchronous save")
    for width, layers, length in ((128, 4, 128), (256, 6, 256)):
        whole, guards = (statistics.median(times) for times in step_times(arguments.steps, width, layers, length))
        print(f"guards, width {width}: {1e6 * guards:.0f} us of a step of {1000 * whole:.1f} ms: {100 * guards / whole:.3f} %")


if __name__ == "__main__":
    main()
