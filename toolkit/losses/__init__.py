"""Losses: functions of tensors and totals, one file a family."""
