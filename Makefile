# SPDX-License-Identifier: Apache-2.0
# What there is to do here; `make` alone lists it. docs/setup.md explains the set-up.

PYTHON ?= python3
ARGS ?=
REQUIRE ?=
PROFILE ?= ci

RUN := $(PYTHON) tools/run.py

.DEFAULT_GOAL := help
.PHONY: help setup test next prove faults demo walk sim bench needle check lint diagram docs site \
	clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/make \1\t\2/' | expand -t 16

setup:  ## create or update the environments (REQUIRE="mori plain": fail without)
	@$(PYTHON) tools/setup.py --require "$(REQUIRE)"

test: check  ## set up, check, and run all tests in all environments at once (ARGS="..." for pytest)
	$(RUN) --profile each --together -- python -m pytest $(ARGS)

next: setup  ## run what needs no compiled vLLM on the Python files of vLLM 0.33, fetched once (340 MB)
	UMBP_PURE_TESTS=skip $(PYTHON) tools/next_vllm.py -- python -m pytest \
		$(or $(ARGS),tests/unit tests/cases tests/property)

prove: setup  ## property tests, exhaustive search and mutants (PROFILE=nightly: 100,000 examples)
	@$(RUN) --profile newest -- python tools/prove.py --profile $(PROFILE) $(ARGS)

faults: setup  ## stop, kill and restart the servers of both shared modes under load (ARGS="--only ...")
	@$(RUN) --profile mori -- python tests/faults/run_faults.py $(ARGS)

demo: setup  ## set up and show an answer restored from offloaded KV (ARGS="--backend embedded")
	@$(RUN) --profile best -- umbp demo $(ARGS)

walk: site  ## do what docs/walkthrough.md says: engines, Prometheus, a browser (ARGS="--only memory")
	@$(RUN) --profile each -- python tools/walk $(ARGS)

sim: setup  ## set up and simulate engines, traffic and faults (ARGS="--seed 3 --faults random")
	@$(RUN) --profile best -- umbp sim $(ARGS)

bench: setup  ## set up and run the benchmarks, which print ratios (ARGS="..." for each of them)
	@status=0; for script in benchmarks/[!_]*.py; do \
		$(RUN) --profile best -- python $$script $(ARGS) || status=1; \
	done; exit $$status

needle: setup  ## set up and compare answers from restored KV with those from the prefix cache
	@$(RUN) --profile best -- python benchmarks/needle $(ARGS)

check: setup lint site  ## set up, then formatting, style, types, import contracts and the site
	$(RUN) --profile best -- mypy --strict umbp
	$(RUN) --profile best -- lint-imports

lint: setup  ## formatting and style alone
	$(RUN) --profile best -- ruff format --check .
	$(RUN) --profile best -- ruff check .

diagram: setup  ## write docs/lifecycle.md, with the state diagrams, from the tables in the code
	@$(RUN) --profile best -- python -m umbp.fsm.diagram > docs/lifecycle.md.new \
		&& mv docs/lifecycle.md.new docs/lifecycle.md \
		|| { rm -f docs/lifecycle.md.new; exit 1; }

docs: diagram  ## write all generated pages of docs/: lifecycle.md, metrics.md and options.md
	$(RUN) --profile best -- python -m umbp.cli.options_page docs/options.md
	$(RUN) --profile best -- python -m umbp.cli.metrics_page docs/metrics.md

site: setup  ## write the documentation as a site to build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(RUN) --profile best -- mkdocs build --strict

clean:  ## remove the environments, the built libraries and the caches
	rm -rf .envs .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build \
		umbp.egg-info
