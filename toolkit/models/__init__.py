"""Models and tokenizers: loading, built-in shapes, adapters, quantized and compiled layers."""
