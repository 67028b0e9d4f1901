# make train: the main job.  make test: the tests.  Both make .venv from requirements.txt first.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
CLUSTER_PACKAGES := openssh-server openssh-client pdsh openmpi-bin iproute2 util-linux slurmctld slurmd slurm-client munge
CLUSTER_TESTS ?= cluster
DONE := .venv/requirements.done
# Two files at a time, in order; then, with nothing beside them, those that watch a clock.
define pytest
$(BIN)/python -m pytest -m "$(1) and not alone" -n 2 --dist loadfile --no-loadscope-reorder
$(BIN)/python -m pytest -m "$(1) and alone"
endef

.PHONY: train test test-all test-gpu cluster-test check benchmark clean

train: $(DONE)
	launch/local.sh recipes/pretrain.py experiment=stdlib_tp2_pp2

test: $(DONE)
	$(call pytest,not slow and not gpu and not cluster)

test-all: $(DONE)
	$(call pytest,not gpu and not cluster)

test-gpu: $(DONE)
	$(BIN)/python -m pytest -m gpu

# As root: what is missing is installed on Debian and its kin (its services stopped), elsewhere named by the tests that
# are skipped.
cluster-test: $(DONE)
	@if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    missing=$$(dpkg-query --show --showformat '$${Package} $${Status}\n' $(CLUSTER_PACKAGES) 2>&1 | \
	        grep -v 'ok installed$$' | sed 's/^dpkg-query: no packages found matching //; s/ .*//'); \
	    [ -z "$$missing" ] || { apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing; } || exit 1; \
	    services=$$(grep -xE 'munge|slurmctld|slurmd' <<<"$$missing" || true); \
	    [ -z "$$services" ] || systemctl disable --quiet --now $$services 2>/dev/null || true; \
	fi
	$(BIN)/python -m pytest -m "$(CLUSTER_TESTS)"

check: $(DONE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck launch/*.sh launch/slurm.sbatch .ci/run

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
