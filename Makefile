# make demo and make test do all set-up themselves; make env is that set-up.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
TPU_STAMP := $(VENV)/.libtpu
export JAX_PLATFORMS ?= cpu
export JAX_SKIP_CUDA_CONSTRAINTS_CHECK ?= 1

# Where a GPU is: on a machine that has the packages already, `make gpu PY=python3`.
PY ?= $(BIN)/python

.PHONY: env demo test gpu nightly lint format bench clean docs

env: $(STAMP)

# The CUDA plugin compiles for GPUs that are not here. Without its dependencies it is 130 MB.
$(STAMP): Makefile constraints.txt pyproject.toml
	@set -e; found=; \
	for candidate in "$(PYTHON)" $(BIN)/python python3 python3.14 python3.13 python3.12; do \
	  if [ -n "$$candidate" ] && "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "coop_jax needs Python 3.12 or newer; python3 is $$(python3 --version 2>&1)." >&2; \
	  echo "Install one, or name it: make env PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	[ -x $(BIN)/python ] || "$$found" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,examples,plot,rich,docs]'
	@if [ "$$(uname -s)" = Linux ]; then \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt jax-cuda13-plugin jax-cuda13-pjrt; \
	else echo "no CUDA plugin for $$(uname -s): tests that compile for an absent GPU will be skipped"; fi
	@touch $@

demo: env
	$(BIN)/python -m examples.demo

# libtpu compiles for TPUs that are not here: 214 MB, which only the tests fetch.
$(TPU_STAMP): $(STAMP)
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt libtpu; \
	else echo "no libtpu for $$(uname -sm): tests that compile for an absent TPU will be skipped"; fi
	@touch $@

test: env $(TPU_STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

gpu:
	@if [ "$(PY)" = "$(BIN)/python" ]; then $(MAKE) env; fi
	XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_PLATFORMS=cuda,cpu $(PY) -m pytest --gpu -m gpu -W default -n 4
	JAX_PLATFORMS=cuda,cpu $(PY) -m benchmarks.gpu

# The tests with kernels as users have them, then random programs against the undecorated ones, for hours;
# EXAMPLES and SEED choose how many and which.
nightly: env $(TPU_STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --optimized
	$(BIN)/python -m tests.nightly --examples $(or $(EXAMPLES),5000) --seed $(or $(SEED),0)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in docs/_build.
docs: env
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build

bench: env
	$(BIN)/python -m benchmarks.gpt12
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.promise

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
