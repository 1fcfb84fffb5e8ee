"""Exact attention over packed rows: transformers' attention interface, kernels, and which models may be packed."""
