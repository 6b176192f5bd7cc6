# Everything a newcomer needs: `make train` and `make test` set up what they use, once.
#
#   ARGS         what follows `torchquorum train`      make train ARGS="--model cnn"
#   PYTEST_ARGS  what follows `pytest`                 make test PYTEST_ARGS="tests/unit -x"
#   BENCH_ARGS   what follows `benchmarks/bench.py`    make bench BENCH_ARGS="--only speed --rounds 5"
#   TF_PYTHON    a Python that has tensorflow          make bench TF_PYTHON=tf/bin/python
#   CHAOS_ARGS   what follows the fault matrix         make chaos CHAOS_ARGS="-k 'worker and SIGSTOP'"
#   MUTATE_ARGS  what follows `tools/mutate.py`        make mutate MUTATE_ARGS="--only quorum.py:300"
#   SOAK_ARGS    what follows the soak test            make soak SOAK_ARGS="--updates 100000"
#   PIP_ARGS     what follows `pip install`            make train PIP_ARGS="--find-links wheels"
#   PYTHON       the Python that builds .venv          make train PYTHON=python3.12

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?= -n 4 --dist worksteal
PIP_ARGS ?=
N ?= 20
SEED ?= 1
DISTURB ?=
FUZZ_MINUTES ?= 10
HUNT_MINUTES ?= 10
FUZZ_ARGS ?=
MUTATE_ARGS ?=
BENCH_ARGS ?=
TF_PYTHON ?=
CHAOS_ARGS ?=
SOAK_ARGS ?=

# The tests start hundreds of interpreters: what they compile is kept, as Python does unless it is told not to.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
# The stamps live inside .venv: whoever removes it removes them too.
VENV_STAMP := $(VENV)/.stamps/venv
RUN_STAMP := $(VENV)/.stamps/run
DEV_STAMP := $(VENV)/.stamps/dev

# pip, reduced to one line for each file that comes and one for the installation.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	-c constraints.txt $(PIP_ARGS)
SHORTLY = awk '/\.metadata/ { next } \
	/^ *(Downloading|Using cached) / { n = split($$0, part, "/"); sub(/^ *(Downloading|Using cached) /, "", part[n]); \
		print "    " part[n]; fflush() } \
	/^Installing collected/ { print "    unpacking"; fflush() }'

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: train
train: $(RUN_STAMP) ## Train MNIST on a local cluster of 1 ps and 2 workers (ARGS=...)
	@$(BIN)/torchquorum train $(ARGS)

.PHONY: test
test: $(DEV_STAMP) ## Run the tests (PYTEST_ARGS=...)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: test-long
test-long: $(DEV_STAMP) ## Run the tests that `make test` has no time for: codes under Slurm and torchrun, every class killed, ...
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m long

.PHONY: flake
flake: $(DEV_STAMP) ## Run the tests N=20 times in random order, two suites at a time (PYTEST_ARGS=..., DISTURB=1)
	$(BIN)/python tools/flake.py --times $(N) --seed $(SEED) $(if $(DISTURB),--disturb) -- $(PYTEST_ARGS)

.PHONY: fuzz
fuzz: $(DEV_STAMP) ## Throw damaged inputs at everything that reads some (FUZZ_MINUTES=10, FUZZ_ARGS=...)
	PYTHONPATH=src:. $(BIN)/python -m tests.fuzz.run --minutes $(FUZZ_MINUTES) $(FUZZ_ARGS)

.PHONY: hunt
hunt: $(DEV_STAMP) ## Play runs with faults in a simulated cluster (HUNT_MINUTES=10, SEED=... tells one of them)
	PYTHONPATH=src:. PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -m tests.hunt --minutes $(HUNT_MINUTES) \
		$(if $(filter command line environment,$(origin SEED)),--seed $(SEED))

.PHONY: explore
explore: $(DEV_STAMP) ## Take the steps of the fast path in every order, with a fault at every point: 2 and 3 workers
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python -m tests.hunt.explore

.PHONY: coverage
coverage: $(DEV_STAMP) ## What share of the branches the tests take, with a floor for the core
	rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m pytest $(PYTEST_ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage json -q -o .coverage.json
	$(BIN)/python tools/coverage_floor.py .coverage.json

.PHONY: mutate
mutate: $(DEV_STAMP) ## Change the rules in one place at a time: do the tests notice?
	nice -n 10 $(BIN)/python tools/mutate.py $(MUTATE_ARGS)

.PHONY: chaos
chaos: $(DEV_STAMP) ## Run the fault matrix: every fault, task, rule and moment (CHAOS_ARGS="-k 'ps and sync'")
	$(BIN)/python -m tests.chaos --part matrix $(CHAOS_ARGS)

.PHONY: chaos-beside
chaos-beside: $(DEV_STAMP) ## Run what is beside it: pauses, slow transfers, exceptions and exits, disks, folders, files
	$(BIN)/python -m tests.chaos --part beside $(CHAOS_ARGS)

.PHONY: replay
replay: $(DEV_STAMP) ## Record runs, kill their tasks and make the runs again, bit for bit
	$(BIN)/python -m pytest -m replays tests/process/test_replay.py

.PHONY: ray
ray: $(DEV_STAMP) ## Run the tests on a real Ray of several machines on this one
	$(BIN)/python -m pytest -m on_ray tests/process/test_ray.py

.PHONY: frameworks
frameworks: $(DEV_STAMP) ## Run Lightning, the Hugging Face Trainer and accelerate with one and two workers
	$(BIN)/python -m pytest -m "frameworks or not frameworks" tests/process/test_frameworks.py

.PHONY: package
package: $(DEV_STAMP) ## Build the wheel and the sdist into dist/, install the wheel into an empty environment, train with it
	$(BIN)/python -m pytest -m packages tests/process/test_package.py

.PHONY: soak
soak: $(DEV_STAMP) ## A million updates while workers are killed; the ps must not grow (SOAK_ARGS=...)
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

.PHONY: check
check: check-format check-lint check-types check-layers ## Check format, lint, types and the layers

.PHONY: check-format
check-format: $(DEV_STAMP) ## Is the code formatted?
	$(BIN)/ruff format --check .

.PHONY: check-lint
check-lint: $(DEV_STAMP) ## Does the linter agree?
	$(BIN)/ruff check .

.PHONY: check-types
check-types: $(DEV_STAMP) ## Do the types agree?
	$(BIN)/basedpyright

.PHONY: check-layers
check-layers: $(DEV_STAMP) ## Do the folders import downwards only?
	$(BIN)/lint-imports

.PHONY: format
format: $(DEV_STAMP) ## Format the code and repair what the linter can
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

.PHONY: bench
bench: $(RUN_STAMP) ## Measure speed, bandwidth, load, scaling, start-up and memory (BENCH_ARGS=... TF_PYTHON=...)
	@$(BIN)/python benchmarks/bench.py --tensorflow "$(TF_PYTHON)" $(BENCH_ARGS)

.PHONY: bench-docs
bench-docs: $(RUN_STAMP) ## Bring the tables and pictures of docs/speed.md up to date with the newest figures
	@$(BIN)/python benchmarks/document.py

.PHONY: docs
docs: $(DEV_STAMP) ## Build the documents as pages with search, which need no network, into build/site
	@$(BIN)/python -c "import material" 2>/dev/null || $(PIP_INSTALL) -e '.[docs]' | $(SHORTLY)
	$(BIN)/python tools/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "the documents: build/site/index.html"

.PHONY: clean
clean: ## Remove .venv, caches and build artefacts; runs/ is kept
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name '*.egg-info' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV_STAMP):
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: no '$(PYTHON)' on this machine; install Python 3.11 or newer, or say where it is: make PYTHON=/path/to/python3" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: '$(PYTHON)' is $$($(PYTHON) -V 2>&1); Python 3.11 or newer is needed; name one with make PYTHON=..." >&2; \
		exit 1; }
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
		echo "make: '$(PYTHON) -m venv' failed; on Debian and Ubuntu, apt-get install python3-venv" >&2; \
		exit 1; }
	@mkdir -p $(@D) && touch $@

$(RUN_STAMP): $(VENV_STAMP) pyproject.toml constraints.txt
	@echo "==> installing torchquorum (torch is large: the first time takes a few minutes)"
	@$(PIP_INSTALL) -e . | $(SHORTLY)
	@touch $@

# After RUN_STAMP, not beside it: two installations into one .venv must not meet under `make -j`.
$(DEV_STAMP): $(RUN_STAMP)
	@echo "==> installing the developers' tools"
	@$(PIP_INSTALL) -e '.[dev]' | $(SHORTLY)
	@touch $@
