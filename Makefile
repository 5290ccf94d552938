# The environment .venv is made by `make setup`; every other command sees to it first.
# PYTHON=python3.12 chooses the interpreter, FRESH=1 lets the demo write its own chats.

SHELL := bash
PY := .venv/bin/python
ENGINES := "$${DRAFTERS_CACHE:-$$HOME/.cache/drafters}/engines"

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-quick test check engines engines-check mutants chaos lint types fast bench bench-methods fmt clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

setup: ## make the environment .venv; quick where nothing has changed
	@PYTHON='$(PYTHON)' bash scripts/setup.sh

demo: setup ## the main job: fetch the target, train two drafters, benchmark them (under 25 minutes)
	$(PY) scripts/demo.py $(if $(FRESH),--fresh)

demo-quick: setup ## the same with tiny sizes (under 3 minutes)
	$(PY) scripts/demo.py --quick

bench: setup ## the full table on what the demo trained
	$(PY) scripts/demo.py --bench

bench-methods: setup ## train every family on the same tokens and measure them on the same prompts (hours)
	$(PY) scripts/demo.py --plan configs/demo/methods.yaml

test: setup ## every test; those that need a GPU are skipped without one
	$(PY) -m pytest -m '' -n 2 --dist worksteal

check: setup ## lint, types and the fast tests, side by side (about 3 minutes)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync types fast lint

engines: setup ## build vLLM's CPU build and llama.cpp beside the cached target, to serve exports in (about 12 minutes)
	@bash scripts/engines.sh $(ENGINES)

engines-check: setup ## vLLM drafts what is drafted here (skipped in a line where it cannot be built in 6 minutes)
	@if timeout 360 bash scripts/engines.sh $(ENGINES) vllm; then \
		$(PY) -m pytest -m engines -s tests/engines/test_vllm_serves.py tests/engines/test_speculators_forward.py; \
	else echo 'engines-check: skipped: vLLM cannot be built here in 6 minutes'; fi

mutants: setup ## change what the exact tests prove, one expression at a time (an hour; MUTANTS='drafters/laws.py' for one file)
	$(PY) -m tests.mutants $(MUTANTS)

chaos: setup ## stop every command at random moments, and see it go on (10 minutes; CHAOS='--seed 7')
	$(PY) -m tests.chaos $(CHAOS)

lint: setup ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup ## pyright
	$(PY) -m pyright

fast: setup ## the fast tests
	$(PY) -m pytest -n 2

fmt: setup ## format, and mend what ruff can mend
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

clean: ## remove what tools and runs left here, the environment too; the cached target stays
	rm -rf .venv build dist wandb outputs runs htmlcov .coverage
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
