# `make demo` and `make test` work from a fresh clone: they make .venv and install into it first.
# PYTHON=python3.12 chooses the interpreter that .venv is made from, WORKERS=4 the test processes.

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format

help:
	@echo "make demo     a trained model on two processes, quantized to int4, generating text"
	@echo "make test     lint, type check and all tests"
	@echo "make lint     ruff and mypy"
	@echo "make format   ruff, rewriting files"
	@echo "make install  .venv with this package and everything that the targets above need"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("woq_triton needs Python 3.10 or newer: make PYTHON=python3.12 ..." if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[autotp,test]'
	@touch $@

demo: $(STAMP)
	$(BIN)/woq-triton generate --tp 2 --num-bits 4 --group-size 64 --dtype float32 --compare-tp
	@echo; echo "The same in bfloat16:"; echo
	$(BIN)/woq-triton generate --tp 2 --num-bits 4 --group-size 64 --dtype bfloat16 --compare-tp --brief

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
