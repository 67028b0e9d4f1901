# make train: the main job.  make test: the tests.  Both make .venv from requirements.txt first.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
DONE := .venv/requirements.done

.PHONY: train test test-all test-gpu check benchmark clean

train: $(DONE)
	launch/local.sh recipes/pretrain.py experiment=stdlib_tp2_pp2

test: $(DONE)
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(DONE)
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(DONE)
	$(BIN)/python -m pytest -m gpu

check: $(DONE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck launch/*.sh .ci/run

benchmark: $(DONE)
	$(BIN)/python recipes/benchmark.py

$(DONE): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo "making .venv from requirements.txt (about two minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf .venv
