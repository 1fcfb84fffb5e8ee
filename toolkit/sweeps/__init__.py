"""Sweeps: trials as ordinary runs, proposed by a strategy, in a journal that loses none and repeats none."""
