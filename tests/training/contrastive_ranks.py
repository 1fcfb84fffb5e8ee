"""One rank of a global batch in two passes: writes the loss, the metrics and every gradient to result-RANK.pt.

    RANK=0 WORLD_SIZE=2 ... python tests/training/contrastive_ranks.py FOLDER MICRO-BATCH COUNT WAY
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parent))
from test_contrastive import LOSSES, batch_of, documents, in_two_passes

if __name__ == "__main__":
    folder, micro, count, way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if way == "bf16" else "no")
    rank, ranks = accelerator.process_index, accelerator.num_processes
    results = {}
    for name in LOSSES:
        for dtype in (torch.float64, torch.float32)[way == "bf16" :]:
            def prepare(model: torch.nn.Module) -> torch.nn.Module:
                if way == "checkpointing":
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                return accelerator.prepare(model)

            batch = batch_of(documents(count), micro, rank, ranks)
            metrics, gradients = in_two_passes(name, batch, dtype, 0.1, prepare, accelerator)
            results[name, str(dtype)] = {"loss": metrics["loss"], "gradients": gradients, "real": batch.real}
    torch.save(results, Path(folder) / f"result-{rank}.pt")
    accelerator.end_training()
