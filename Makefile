# `make demo` and `make test` work from a fresh clone: they make .venv and install into it first.
# PYTHON=python3.12 chooses the interpreter that .venv is made from, WORKERS=4 the test processes.

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed
ARCHS ?= sm_80 sm_89 sm_90 sm_100 gfx942
TRITON36 := build/triton36
BENCH := build/bench

.DEFAULT_GOAL := help
.PHONY: help install demo test test-triton36 audit families bench host-cost lint format

help:
	@echo "make demo     a trained model on two processes, quantized to int4, generating text"
	@echo "make test     lint, type check and all tests"
	@echo "make lint     ruff and mypy"
	@echo "make audit    compile every kernel for ARCHS, count its instructions, and check the goals"
	@echo "make families every family that AutoTP shards, quantized and compared, as a table"
	@echo "make bench    layers beside their peers and a whole model on this machine: README table, JSON, plots"
	@echo "make host-cost what a product costs the host up to the driver's launch, measured without a GPU"
	@echo "make test-triton36  the kernels' tests on Triton 3.6"
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

# Hundreds of compilations an architecture, twenty minutes on two cores; ARCHS=sm_90 takes less. Triton keeps them.
audit: $(STAMP)
	@mkdir -p build
	$(BIN)/woq-triton audit $(ARCHS:%=--arch %) --check --jobs $(WORKERS) --output build/audit.json

families: $(STAMP)
	$(BIN)/python scripts/families.py

# The peers go into an environment of their own, on top of .venv: transformers changes with what it finds.
$(BENCH)/.installed: $(STAMP) benchmarks/peers.txt
	test -x $(BENCH)/bin/python || $(BIN)/python -m venv $(BENCH)
	$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
	  > "$$($(BENCH)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beneath.pth"
	$(BENCH)/bin/python -m pip install -q -c constraints.txt 'matplotlib>=3.8'
	@grep -v '^#' benchmarks/peers.txt | while read peer; do \
	  $(BENCH)/bin/python -m pip install -q -c constraints.txt $$peer || echo "$$peer cannot be installed and will be missing"; \
	done
	@touch $@

# About ten minutes on two cores that do nothing else; each part shows its own bar.
bench: $(BENCH)/.installed
	@echo "1 of 5: linear layers beside their peers"
	@$(BENCH)/bin/python -m pytest benchmarks -q --benchmark-enable --benchmark-quiet --seconds 0.5
	@echo "2 of 5: the share of the roofline by size"
	@$(BENCH)/bin/python -m pytest benchmarks -q --benchmark-enable --benchmark-quiet --seconds 0.5 \
	  --kind sizes --layers all --tokens 1 --providers 'dense bf16,woq_triton int4,woq_triton int8'
	@echo "3 of 5: the goals on a CPU"
	@$(BENCH)/bin/python -m benchmarks.cpu_goals
	@echo "4 of 5: a whole model"
	@$(BENCH)/bin/python -m benchmarks.end_to_end
	@echo "5 of 5: the table and the plots"
	@$(BENCH)/bin/python -m benchmarks.report

host-cost: $(STAMP)
	$(BIN)/python -m benchmarks.host_cost

# Triton 3.6 replaces the pinned one after the installation: torch's CUDA build would not resolve with it.
# Its interpreter takes arrays of one element for numbers, which numpy ended in 2.4.
$(TRITON36)/.installed: pyproject.toml constraints.txt
	test -x $(TRITON36)/bin/python || $(PYTHON) -m venv $(TRITON36)
	$(TRITON36)/bin/python -m pip install -c constraints.txt -e '.[autotp,test]'
	$(TRITON36)/bin/python -m pip install --no-deps triton==3.6.0 'numpy<2.4'
	@touch $@

test-triton36: $(TRITON36)/.installed
	$(TRITON36)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/kernels $(wildcard tests/test_audit*.py)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
