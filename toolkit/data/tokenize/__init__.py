"""From rows to token ids, labels and masks."""
