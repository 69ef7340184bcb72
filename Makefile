# Two commands do all the set-up on a fresh machine: `make serve` and `make test`.
PORT ?= 8000
HOST ?= 127.0.0.1
DATA ?= ./data
MODEL ?= smollm2-135m
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Compiled files are kept, whatever the environment says: every start of a process would compile hundreds anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-all lint bench clean

$(BIN)/.serve: pyproject.toml
	@echo "Installing into $(VENV): the first time this takes a few minutes …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(BIN)/.dev: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(BIN)/.serve

serve: $(BIN)/.serve
	@exec $(BIN)/headrace serve --host $(HOST) --port $(PORT) --data $(DATA) --model $(MODEL)

# One test process a core; the tests of a file stay together, so that what they share is made once.
TESTS := $(BIN)/python -m pytest -n auto --dist loadfile

test: $(BIN)/.dev
	$(TESTS)

test-all: $(BIN)/.dev
	$(TESTS) -m ''

lint: $(BIN)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(BIN)/.dev
	$(BIN)/headrace bench

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
