"""The spine: accelerator, step, evaluation, the run, its state, resume and stopping."""
