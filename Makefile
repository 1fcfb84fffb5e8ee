# make demo     pretrain on real text, fine-tune, and open runs/demo/report.html (about three minutes on two cores)
# make test     everything the tests prove
# make lint     ruff and mypy
# make install  only the environment, in .venv

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test lint install clean

demo: $(STAMP)
	$(BIN)/python recipes/pretrain.py --output-dir runs/demo/pretrain --overwrite-output-dir
	$(BIN)/python recipes/sft.py --model runs/demo/pretrain/model --num-train-epochs 1 --output-dir runs/demo/sft --overwrite-output-dir
	$(BIN)/python -m toolkit.report runs/demo/pretrain runs/demo/sft --output runs/demo/report.html

test: $(STAMP)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest tests $(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(STAMP)

# Plain pip with the versions that were tested. The stamp comes last: a half-made environment is made again.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf .venv runs build *.egg-info
