# `make demo` and `make test` are all that is needed on a machine with Python 3.11 or newer.
# Both set up .venv first, once: the stamp's name holds a checksum of what decides the installation.
#
#   PYTHON=python3.12    which Python makes .venv (the first suitable one otherwise)
#   ARGS="-k merge -x"   more arguments for pytest

.DEFAULT_GOAL := help
.PHONY: help demo test check format clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.vitrail-$(shell (pwd; cat pyproject.toml constraints.txt) | cksum | cut -d' ' -f1)

# A name on the path is not enough: it may be too old, a shim without a Python, or lack what makes a venv.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo $$python && break; done)

help:
	@echo "make demo     show the model in the package on six pictures, merged more and more"
	@echo "make test     everything that must pass: check, then the tests; ARGS=--cov measures coverage, too"
	@echo "make check    formatting, lint, types and layering, without the tests"
	@echo "make format   format the code and repair what the linter can"
	@echo "make clean    remove .venv, caches and the demo's output"

demo: $(STAMP)
	$(BIN)/vitrail demo

# One thread for each worker: the workers already fill the cores.
test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n logical --maxprocesses 4 --dist worksteal $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache demo
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv that is already there, of whatever origin, is installed into.
$(STAMP):
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		test -n "$(PYTHON)" || { echo "Python 3.11 or newer, with venv, is needed: make PYTHON=/path/to/python" >&2; exit 1; }; \
		$(PYTHON) -m venv $(VENV); \
	fi
	@echo "Installing Vitrail and its tools into $(VENV); the first time this takes a few minutes ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.vitrail-*
	@touch $@
