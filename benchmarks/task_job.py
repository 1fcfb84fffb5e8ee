"""One run of one side in `benchmarks/tasks.py`: what it works on, and what is measured of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from side_by_side import Stopwatch, first_step_callback, peak_memory

BATCHES = {
    "token_classification": 32, "question_answering": 8, "seq2seq": 16, "masked_lm": 8, "embedding": 64, "reranker": 8,
    "multiple_choice": 16, "classification": 32, "classification_of_documents": 16,
}  # fmt: skip
MAX_LENGTHS = {
    "token_classification": 128, "question_answering": 384, "seq2seq": 256, "masked_lm": 256, "embedding": 128, "reranker": 128,
    "multiple_choice": 128, "classification": 128, "classification_of_documents": 512,
}  # fmt: skip
ROWS_A_STEP = {"masked_lm": 22}  # texts of which a batch of packed rows is made; of all others as many as the batch
CHECKED_ROWS = 8


@dataclass
class StepWatch(Stopwatch):
    """CPU seconds from the end of the warm-up's last step to that of the last one, and the memory held until then."""

    peak: float = 0.0

    def step_done(self) -> None:
        super().step_done()
        self.peak = peak_memory()
        if self.steps > self.warm_up:
            self.seconds = self.now() - self._since


@dataclass(frozen=True)
class Job:
    """`folder` is the run's own, with what `write_inputs` wrote. A check has one step of a few rows and no dropout."""

    folder: Path
    task: str
    steps: int  # that are timed
    warm_up: int  # steps before
    is_check: bool
    watch: StepWatch
    losses: list[float] = field(default_factory=list)
    learning_rate: float = 5e-5
    doc_stride: int = 128
    max_target_length: int = 64
    mlm_probability: float = 0.15
    texts: int | None = None  # in a step, where they are not cut into blocks

    @property
    def batch(self) -> int:
        """Examples in a step. A check has all its rows in one; Trainer has each window alone, as its loss counts padding."""
        return self.texts or BATCHES[self.task] if not self.is_check else 1 if self.task == "question_answering" else 64

    @property
    def max_length(self) -> int:
        return MAX_LENGTHS[self.task]

    @property
    def model(self) -> str:
        return str(self.folder / ("check" if self.is_check else "model"))

    @property
    def rows(self) -> Path:
        return self.folder / ("check.jsonl" if self.is_check else "train.jsonl")

    def callback(self) -> Any:
        """Tells the stopwatch of a Trainer's steps."""
        return first_step_callback(self.watch)
