# Every target makes the environment that it needs on its first run; `make help` lists them.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
NEWEST := .venv-newest
OLDEST := .venv-oldest
# Tests of one file share fixtures and compiled programs, so a worker takes whole files.
PYTEST := -m pytest -p no:benchmark -q --dist loadfile --no-loadscope-reorder
# The files with tests in single precision: to collect all others would take as long as to run these.
FLOAT32 = $(shell grep -rlF --include='test_*.py' mark.float32 tests)
# Those with long tests, for the same reason.
SLOW = $(shell grep -rlF --include='test_*.py' mark.slow tests)
# Folder of the data sets that may not be redistributed, if there is one beside the checkout.
NUMPYRO_EXT_DATA ?= $(abspath $(wildcard ../shared/data))
export NUMPYRO_EXT_DATA

# Tests, examples and pages start from nothing, and leave nothing behind.
NUMPYRO_EXT_COMPILED_PROGRAMS ?= off
export NUMPYRO_EXT_COMPILED_PROGRAMS

# The fast tests compile with few optimisations (tests/conftest.py); these and the notebooks as users do.
test-slow test-optimised: export NUMPYRO_EXT_TEST_OPTIMIZE = 1
# QUICK=1 compiles examples and pages with few optimisations, as the fast tests are: half the time.
QUICK ?=
ifneq ($(QUICK),)
docs-test site: export JAX_DISABLE_MOST_OPTIMIZATIONS = 1
endif
# What these run of their tests, such as 0/4 to 3/4, and which pages the site executes; all if empty.
SHARE ?=
site: export NUMPYRO_EXT_SITE_SHARE = $(SHARE)
test-thorough test-slow test-newest test-optimised test-oldest: export NUMPYRO_EXT_TEST_SHARE = $(SHARE)
# The notebooks that are run: all of them, or those that are named.
NOTEBOOKS ?= notebooks

# Workers with several BLAS threads each wait for one another when there are more of them than cores.
test test-float32 test-thorough test-optimised test-slow test-newest test-oldest docs-test notebooks site: export OPENBLAS_NUM_THREADS = 1

.PHONY: help demo test test-full test-everything test-float32 test-thorough test-optimised test-slow test-newest test-oldest lint format types docs-test notebooks site bench scoreboard clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/' | expand -t 16

demo: $(VENV)/.test ## compare NUTS, SMC, SVI, Laplace and EP on the coal-mining data; draws demo/*.png
	OPENBLAS_NUM_THREADS=1 $(VENV)/bin/python -m numpyro_ext.demo

test: $(VENV)/.test ## the fast suite in float64, then the small float32 job
	$(VENV)/bin/python $(PYTEST) -n $(WORKERS)
	@$(MAKE) --no-print-directory test-float32

test-float32: $(VENV)/.test ## the tests marked float32, in single precision
	NUMPYRO_EXT_TEST_PRECISION=float32 $(VENV)/bin/python $(PYTEST) -n $(WORKERS) -m "float32 and not slow and not thorough" $(FLOAT32)

test-thorough: $(VENV)/.test ## whole engines and further cases, in float64 and then in single precision; SHARE=0/12 for a part
	$(VENV)/bin/python $(PYTEST) -n $(WORKERS) -m "thorough and not slow"
	NUMPYRO_EXT_TEST_PRECISION=float32 $(VENV)/bin/python $(PYTEST) -n $(WORKERS) -m "thorough and float32 and not slow" $(FLOAT32) || [ $$? -eq 5 ] # 5: none is in this share

test-full: test test-thorough test-optimised test-slow ## everything on this Python

test-everything: lint types test-full test-oldest test-newest docs-test site notebooks ## all tiers on all Pythons, examples, pages and notebooks

test-optimised: $(VENV)/.test ## the tests of the single-precision job in float64, compiled as users have it; SHARE=0/4 for a part
	$(VENV)/bin/python $(PYTEST) -n $(WORKERS) -m "float32 and not slow" $(FLOAT32)

test-slow: $(VENV)/.test ## long runs: samplers, random models, builds of the package; SHARE=0/4 for a part of them
	$(VENV)/bin/python $(PYTEST) -n $(WORKERS) -m slow --durations=20 $(SLOW) || [ $$? -eq 5 ] # 5: none is in this share

test-newest: $(NEWEST)/.test ## the fast and thorough tests on the newest Python of this machine; SHARE=0/2 for a part of them
	$(NEWEST)/bin/python $(PYTEST) -n $(WORKERS) -m "not slow"

test-oldest: $(OLDEST)/.oldest ## the tests of the single-precision job in float64, with the oldest versions of all dependencies; SHARE=0/3 for a part
	$(OLDEST)/bin/python $(PYTEST) -n $(WORKERS) -m "float32 and not slow" $(FLOAT32) -W ignore::DeprecationWarning

lint: $(VENV)/.dev ## ruff: rules and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.dev ## let ruff repair what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(VENV)/.dev ## mypy
	$(VENV)/bin/mypy

docs-test: $(VENV)/.test ## the examples in the docstrings and the code of the README
	$(VENV)/bin/python $(PYTEST) -n $(WORKERS) --doctest-modules numpyro_ext models docs

notebooks: $(VENV)/.dev ## run the notebooks from top to bottom; NOTEBOOKS="notebooks/a.ipynb ..." for some
ifneq ($(wildcard notebooks/*.ipynb),)
	$(VENV)/bin/python $(PYTEST) -n $(WORKERS) --nbmake --nbmake-timeout=1200 $(NOTEBOOKS)
else
	@echo "notebooks/ holds no notebook: nothing to run"
endif

site: $(VENV)/.docs ## the documentation as HTML in docs/_build/html, its pages executed; warnings are errors; SHARE=0/4 executes a part
	$(VENV)/bin/python -m sphinx -b html -j $(WORKERS) -W --keep-going -q docs docs/_build/html

bench: $(VENV)/.benchmark ## benchmarks; results are printed and written to benchmarks/results
ifneq ($(wildcard benchmarks/*.py),)
	$(VENV)/bin/python -m pytest -q -m "" --benchmark-enable --benchmark-columns=min,median,iqr,rounds benchmarks
else
	@echo "benchmarks/ holds no benchmark: nothing to run"
endif

scoreboard: $(VENV)/.test ## engines beside reference draws and known truth: measures what is missing, writes docs/scoreboard.md
	OPENBLAS_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.scores.simulations
	OPENBLAS_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.scores.park
	OPENBLAS_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.scores.insteval
	OPENBLAS_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.scores.scoreboard

clean: ## remove the environments and caches
	rm -rf $(VENV) $(NEWEST) $(OLDEST) .compiled build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks

# The stamps: an environment is installed again when the list of dependencies changes.
$(VENV)/bin/python:
	@scripts/make_venv.sh "$(PYTHON)" $(VENV)

$(OLDEST)/bin/python:
	@scripts/make_venv.sh "$(PYTHON)" $(OLDEST)

$(NEWEST)/bin/python:
	@newest=$$(scripts/newest_python.sh) && scripts/make_venv.sh "$$newest" $(NEWEST)

%/.test: pyproject.toml | %/bin/python
	@echo "Installing numpyro_ext and its test dependencies in $* (a few minutes the first time)"
	@$*/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	@touch $@

%/.dev: pyproject.toml | %/.test
	@echo "Installing the development tools in $*"
	@$*/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

%/.docs: pyproject.toml | %/.dev
	@echo "Installing what builds the documentation in $*"
	@$*/bin/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

# Some peers of the benchmarks compile, which takes minutes.
%/.benchmark: pyproject.toml | %/.dev
	@echo "Installing the peers of the benchmarks in $*"
	@$*/bin/python -m pip install --quiet --disable-pip-version-check -e ".[benchmark]"
	@touch $@

%/.oldest: pyproject.toml scripts/oldest_versions.py | %/bin/python
	@echo "Installing numpyro_ext with the oldest versions of its dependencies in $*"
	@$*/bin/python scripts/oldest_versions.py > $*/constraints.txt
	@$*/bin/python -m pip install --quiet --disable-pip-version-check -c $*/constraints.txt -e ".[test]"
	@touch $@

.PRECIOUS: %/bin/python %/.test %/.dev %/.docs %/.benchmark %/.oldest
