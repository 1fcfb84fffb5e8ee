"""What each forked run would build anew, built once in the process that it is forked from, which imports this file (`conftest.py`)."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils.chat_template_utils import render_jinja_template

from toolkit.demo_corpus.stdlib import corpus_facts
from toolkit.models.tokenizer import CHATML
from toolkit.runs.run_card import library_versions

get_checkpoint_conversion_mapping("llama")  # a thousand patterns of all models' weights, at the first save: .3 seconds of CPU
render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=CHATML)
library_versions()
corpus_facts()
gc.freeze()  # what is here is looked at by no collection of a run, whose pages would be copied for it
gc.enable()
