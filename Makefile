# make demo     pretrain on real text, fine-tune, and write runs/demo/report.html (under five minutes on two cores)
# make test     each promise of the documentation once
# make test-all all tests: those, then the slow ones, then those of --fp8 next to torchao
# make chaos    faults caused on purpose and malformed inputs, in the long form; the faults' table is in docs/reliability.md
# make bench    every method next to TRL, Trainer or sentence-transformers, in turn: hours; PAIRS runs a side
# make gpu      what one GPU does with the toolkit: tests, recipes, speed next to TRL, in under ten minutes (benchmarks/gpu.py)
# make docs     docs/ and the API reference as a site, in site/
# make lint     ruff and mypy
# make install  the environment alone, in .venv

PYTHON ?= python3
BIN := .venv/bin
CORE := .venv/installed
DEV := .venv/installed-dev
SDK := .venv/installed-sagemaker
SKYPILOT := .venv/installed-skypilot
TORCHAO := .venv/installed-torchao
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# Packages are installed without their compiled form, which their first import writes: where that is forbidden (images often set
# this), every process would compile all it imports anew, for 20 seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-float8 test-all chaos bench gpu docs lint install clean

demo: $(CORE)
	$(BIN)/python recipes/pretrain.py --output-dir runs/demo/pretrain --overwrite-output-dir
	$(BIN)/python recipes/sft.py --model runs/demo/pretrain/model --num-train-epochs 1 --output-dir runs/demo/sft --overwrite-output-dir
	$(BIN)/toolkit report runs/demo/pretrain runs/demo/sft --output runs/demo/report.html

# Three processes for two cores, since many tests wait for something; who is done first takes half of what another has left.
RUN_TESTS := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest tests -n 3 --dist worksteal

test: $(DEV) $(SDK) $(SKYPILOT)
	$(RUN_TESTS) -m "not slow" $(PYTEST)

test-slow: $(DEV) $(SDK)
	$(RUN_TESTS) -m slow $(PYTEST)

test-float8: $(DEV) $(TORCHAO)
	PYTHONPATH=$(CURDIR)/.venv/torchao $(subst pytest tests,pytest tests/models tests/preference/test_reference.py -k "float8 or fp8",$(RUN_TESTS)) $(PYTEST)

test-all: test test-slow test-float8

# TRIALS is the share of the trials in percent; PYTEST="-k power" takes some of the faults.
chaos: $(DEV) $(SDK)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false FAULT_TRIALS=$(or $(TRIALS),100) FAULT_TABLE=docs/reliability.md \
		FUZZ_CASES=$(or $(CASES),300) FUZZ_SEED=$(or $(SEED),$(shell date +%Y%m%d)) \
		$(BIN)/python -m pytest tests/faults tests/hub/test_commit.py tests/sagemaker_jobs/test_simulated_jobs.py \
		tests/fuzz $(PYTEST)

bench: $(DEV)
	for each in sft lora pretrain dpo kto gkd reward tasks; do $(BIN)/python benchmarks/$$each.py --pairs $(or $(PAIRS),3) || exit 1; done
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python -m benchmarks.data --bytes 3e7 --pairs $(or $(PAIRS),3)
	$(BIN)/python benchmarks/saving.py
	for each in grpo rollouts; do $(BIN)/python benchmarks/$$each.py --rounds $(or $(PAIRS),3) || exit 1; done

gpu: $(DEV)
	$(BIN)/python benchmarks/gpu.py $(PARTS)

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo site/index.html

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(CORE)

# Plain pip with the versions that were tested. A stamp comes last: a half-made environment is made again.
$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, as in: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable .
	@touch $(CORE)

$(DEV): $(CORE)
	$(PIP) --editable '.[dev]'
	@touch $(DEV)

# The SageMaker SDK wants older versions of rich, protobuf, packaging and attrs than .venv has: its tests have an environment over it.
SDK_PYTHON := .venv/sagemaker/bin/python
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(SDK): tests/sagemaker_jobs/requirements.txt | $(DEV)
	$(BIN)/python -m venv --clear --without-pip .venv/sagemaker
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > "$$($(SDK_PYTHON) $(PURELIB))/over.pth"
	$(BIN)/python -m pip --python $(SDK_PYTHON) install --quiet --disable-pip-version-check --no-compile --requirement tests/sagemaker_jobs/requirements.txt
	$(BIN)/python -m pip --python $(SDK_PYTHON) install --quiet --disable-pip-version-check --no-deps sagemaker-pytorch-training==3.0.0
	@touch $(SDK)

# SkyPilot for its schemas alone, which tests hold deploy/skypilot.yaml against: without the hundred packages that it requires.
$(SKYPILOT): | $(CORE)
	$(PIP) --no-deps --target .venv/skypilot skypilot==0.14.1
	@touch $(SKYPILOT)

# torchao for the tests of --fp8 alone: where it is installed, transformers imports it in every run.
$(TORCHAO): | $(CORE)
	$(PIP) --no-deps --target .venv/torchao torchao
	@touch $(TORCHAO)

clean:
	rm -rf .venv runs build site *.egg-info
