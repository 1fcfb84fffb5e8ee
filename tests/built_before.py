"""What each forked run would build anew, built once in the process that it is forked from, which imports this file (`conftest.py`)."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # a thousand patterns of all models' weights, at the first save: .3 seconds of CPU
