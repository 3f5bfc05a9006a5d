# Everything one does with Hadal from a checkout. Every target sets up what it needs; `make` alone lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

# uv does not read pip's variable for a local folder of wheels; pass it on, so that no path is written down here.
UV := UV_FIND_LINKS="$$PIP_FIND_LINKS" UV_PYTHON_DOWNLOADS=never $(BIN)/uv

CHANGED ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve chat eval test test-more test-all clients swarm check bench bench-quick bench-peers model pins clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Compiled once and for all: where Python may not write bytecode (PYTHONDONTWRITEBYTECODE), each process of a server
# would compile torch again, 4 s of its 6.
$(VENV)/.ok: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv
	@echo "Installing what Hadal needs and compiling it, once: about a minute. Nothing is shown while it compiles."
	$(UV) pip install --compile-bytecode --python $(BIN)/python -r requirements.txt
	$(UV) pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q src/hadal
	$(BIN)/python -m hadal.commands.kernels
	@touch $@

setup: $(VENV)/.ok  ## make the virtual environment (the other targets call it)

serve: setup  ## serve hadal-tiny on port 8000; ARGS="--help" shows what can be set
	@$(BIN)/hadal serve $(ARGS)

chat: setup  ## chat in the terminal with a running server
	@$(BIN)/hadal chat $(ARGS)

eval: setup  ## how well a running server answers the tasks its model was taught
	@$(BIN)/python -m evals $(ARGS)

test: setup  ## the test suite (9 minutes); CHANGED=main runs the tests of what changed since main
	@$(BIN)/python -m tests.suite test $(if $(CHANGED),--changed $(CHANGED)) $(ARGS)

test-more: setup  ## what `make test` leaves out, and campaigns with fresh seeds (30 minutes)
	@$(BIN)/python -m tests.suite more $(ARGS)

test-all: setup  ## everything at full sizes (hours)
	@$(BIN)/python -m tests.suite all $(ARGS)

clients: setup  ## the newest clients and coding agents of others with this server, as a table (as root)
	@$(BIN)/python -m tests.clients $(ARGS)

swarm: setup  ## ten thousand small worlds with random faults; ARGS="--seed 7" repeats one
	@$(BIN)/python -m tests.sim.swarm $(ARGS)

check: setup  ## ruff and strict type checking
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --quiet --check . || { echo "Not as ruff lays it out: .venv/bin/ruff format ."; exit 1; }
	@$(BIN)/mypy

bench: setup  ## speed beside the peers and the machine's limits, load, overlap, balance
	@$(BIN)/python -m bench $(ARGS)

bench-quick: setup  ## the same in a few minutes, with rough figures
	@$(BIN)/python -m bench --quick $(ARGS)

bench-peers: setup  ## install the engines `make bench` compares with into .peers/ (about 3 GB)
	@$(BIN)/python -m bench.peers.setup $(ARGS)

model: setup  ## train hadal-tiny again from nothing (hours)
	@$(BIN)/python -m train $(ARGS)

pins: setup  ## resolve pyproject.toml anew into requirements.txt
	@$(UV) pip compile -q --no-header --no-annotate --no-emit-find-links --no-emit-index-url \
	    --upgrade --extra apps --extra lab --extra test --extra train --extra zstd --python $(BIN)/python pyproject.toml -o $(VENV)/pins.txt
	@sed 's/+cpu$$//' $(VENV)/pins.txt > requirements.txt

clean:  ## remove the virtual environment and the caches, keep .peers/
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
