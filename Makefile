# `make demo` and `make test` need only Python 3.11 or newer.
# Both create .venv once; the stamp's name has a checksum of what determines the installation.
#
#   PYTHON=python3.12    Python that creates .venv (default: the first suitable one)
#   ARGS="-k merge -x"   extra arguments for pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-lowest test-installed check docs format clean

VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.vitrail-$(shell (pwd; cat pyproject.toml $(CONSTRAINTS)) | cksum | cut -d' ' -f1)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n logical --maxprocesses 4 --dist worksteal

# Check that it runs: a name on the path may be too old, an empty shim, or lack venv.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo $$python && break; done)

help:
	@echo "make demo     run the bundled model on six images, with more and more merging"
	@echo "make test     run all checks and tests; ARGS=--cov also measures coverage"
	@echo "make test-lowest  run the tests with the lowest supported versions of the dependencies"
	@echo "make check    check formatting, lint, types and imports between layers"
	@echo "make docs     build the documentation site in site/, with all links checked"
	@echo "make format   format the code and apply automatic lint fixes"
	@echo "make clean    remove .venv, caches and the output of the demo"

demo: $(STAMP)
	$(BIN)/vitrail demo

# One thread per worker: the workers already use all cores.
test: check
	$(PYTEST) $(ARGS)

# The same tests in .venv-lowest; warnings of old libraries are not errors there.
test-lowest:
	$(MAKE) VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt ARGS="-W default $(ARGS)" test-installed

test-installed: $(STAMP)
	$(PYTEST) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q
	$(BIN)/vitrail web --static site/play

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-lowest .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache demo site
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An existing .venv is reused.
$(STAMP):
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is required: make PYTHON=/path/to/python" >&2; exit 1; }; \
		$(PYTHON) -m venv $(VENV); \
	fi
	@echo "Installing Vitrail and its tools into $(VENV); the first time takes a few minutes ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@rm -f $(VENV)/.vitrail-*
	@touch $@
