# Every target works from a fresh clone: it first makes .venv with the exact versions of requirements.lock.
# Needs python3 >= 3.11 (with venv) and make; no root, no GPU. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOOPS := $(VENV)/.loops
# The extras that the Debian package holds.
DEB_EXTRAS := users cuda postgres web sweep submitit
# Worlds of seeds that no test runs; `make full` begins at a seed of its own.
N ?= 300
SEED ?= 100
SEEDS ?= 160
SITES ?= 1000
QUIET ?= 500
SUMS ?= 1000
STANDBYS ?= 10000
# Of these, what `make full` does: a few minutes each.
FULL_SEEDS := 8
FULL_SITES := 200
# Worlds of `make check`, unless N is given.
CHECK_WORLDS := 200
TORCH ?= torch==2.13.0
PACKAGES := protocol valuation arbiter node_agent app_agent simulator launch

# With it, each of the many processes that tests start would compile all that it imports anew: half of a daemon's start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup packages loops broker store browser prometheus demo lab test plain pure system clock alone format lint types contracts check worlds spare standbys sums forged reasons dryruns attacks idioms bench gpu papers full docs lock wheels deb clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(LOOPS) ## make .venv with everything, at the locked versions

# Without --no-compile pip compiles 270 MB of Python for a minute; Python compiles what is imported, when it is.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "gpu-arbiter needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { echo "cannot make $(VENV); on Debian first run: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

packages: $(READY)

loops: $(LOOPS)

$(LOOPS): $(READY) arbiter/core/policies/themis/auction/kernel.py
	@echo "compiling the auction's loops, once (about a minute)"
	@$(BIN)/python -c 'from arbiter.core.policies.themis.auction.instance import warm_up; warm_up()'
	@touch $@

broker: ## install RabbitMQ when that is possible, else say what to do
	sh scripts/ensure-rabbitmq.sh

# Each after the one before: two installations at a time would stand in each other's way.
store: broker ## install PostgreSQL when that is possible, else say what to do
	sh scripts/ensure-postgres.sh

browser: store ## install Chromium when that is possible, else say what to do
	sh scripts/ensure-chromium.sh

prometheus: browser ## install Prometheus when that is possible, else say what to do
	sh scripts/ensure-prometheus.sh

demo: $(LOOPS) ## two nodes of four simulated GPUs, two tenants, six apps; figures in out/demo/
	$(BIN)/gpu-arbiter demo

test: plain pure system clock alone ## all tests; installs RabbitMQ, PostgreSQL, Chromium and Prometheus when it may, else says what to do

# Tests that need no auction: they run while its loops compile.
PLAIN := tests/launch tests/protocol
AUCTIONS := tests/launch/test_auction_verb.py

plain: $(READY) prometheus
	$(BIN)/python -m pytest $(PLAIN) --ignore $(AUCTIONS)

# Tests that compute: a worker that has no more of its own takes some of the other's.
pure: $(LOOPS)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/core tests/gpu tests/papers tests/properties tests/simulation $(AUCTIONS)

# Tests that mostly wait for other processes: more files of them at a time than there are cores.
system: $(LOOPS) browser
	$(BIN)/python -m pytest -n 5 --dist loadfile -m "not full and not alone and not clock" tests/system tests/contract

# Tests against the clock get a second try (docs/decisions/0003).
define twice
	@rm -f .pytest_cache/v/cache/lastfailed
	$(BIN)/python -m pytest $(1) || { test $$? -eq 1 && \
		echo "a test against the clock failed: those that did, once more (docs/decisions/0003)" >&2 && \
		$(BIN)/python -m pytest $(1) --last-failed --last-failed-no-failures none; }
endef

clock: $(LOOPS) broker
	$(call twice,-n 3 --dist loadfile -m "clock and not full" tests/system)

alone: $(LOOPS)
	$(call twice,-m "alone and not full" tests/system)

full: export GPU_ARBITER_FULL = 1
full: $(LOOPS) prometheus ## what `make check` leaves out, since quicker tests cover most of it (three hours)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "full or hypothesis" --ignore tests/system --ignore tests/contract
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "(full or hypothesis) and not alone" tests/system tests/contract
	$(BIN)/python -m pytest -m "(full or hypothesis) and alone" tests/system
	$(MAKE) --no-print-directory forged SEEDS=$(FULL_SEEDS)
	$(MAKE) --no-print-directory reasons SITES=$(FULL_SITES)
	$(MAKE) --no-print-directory dryruns QUIET=$(FULL_SITES)
	$(MAKE) --no-print-directory worlds N=2000 SEED=$$(date +%s)
	$(MAKE) --no-print-directory standbys SEED=$$(date +%s)

format: $(READY) ## rewrite the code in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY) ## format and lint, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY) ## mypy --strict
	$(BIN)/mypy

contracts: $(READY) ## who may import whom
	$(BIN)/lint-imports

# Material for MkDocs would print a notice about its successor each time.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(READY) ## the pages as a site, out/docs/index.html; every link and anchor is checked
	$(BIN)/mkdocs build --strict

check: ## format, lint, types, import contracts, pages, tests, fault worlds: what CI runs; prints where the time went
	@$(PYTHON) scripts/parts.py packages+prometheus loops,pure+types,lint,contracts,docs,plain system,clock+spare alone

worlds: $(LOOPS) ## N sites full of faults (300), from SEED on: nothing unsafe may happen, all that can finish must
	$(BIN)/gpu-arbiter worlds --count $(N) --seed $(SEED)

# Beside tests that mostly wait: worlds take what these leave of the cores.
spare:
	nice -n 19 $(MAKE) --no-print-directory worlds N=$(if $(filter file,$(origin N)),$(CHECK_WORLDS),$(N))

standbys: $(LOOPS) ## STANDBYS (10000) such sites in which a second arbiter takes over, from SEED on
	$(BIN)/gpu-arbiter worlds --standby --count $(STANDBYS) --seed $(SEED)

sums: $(READY) ## reports and receipts in SUMS (1000) random worlds: to the second what the journal's GPU time adds up to
	$(BIN)/python -m tests.simulation.test_gpu_time_reports $(SUMS)

forged: $(READY) ## hostile agents, SEEDS (160) sieges for each policy and way of sharing: none may end the arbiter
	$(BIN)/python -m tests.properties.test_forged_reports $(SEEDS)

reasons: $(READY) ## what explain names as binding, checked in SITES (1000) random sites against what happens then
	$(BIN)/python -m tests.properties.test_what_binds $(SITES)

dryruns: $(LOOPS) ## what `submit --dry-run` says, checked in QUIET (500) random sites against what happens then
	$(BIN)/python -m tests.properties.test_dry_runs $(QUIET)

attacks: $(LOOPS) ## takes each measure of docs/security.md away, in a copy; the test of its attack must fail then (WORDS="ssh" for some)
	$(BIN)/python -m tests.support.attacks $(WORDS)

idioms: $(READY) ## twenty idioms of training scripts, alone and on a busy site; rewrites their table in docs/training.md
	$(BIN)/python -m tests.support.idioms

bench: $(READY) ## the benchmarks, one JSON document each in out/bench/
	sh scripts/ensure-rabbitmq.sh
	sh scripts/ensure-postgres.sh
	sh scripts/ensure-chromium.sh
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@mkdir -p out/bench
	@failed=""; for script in benchmarks/*.py; do \
		echo "== $$script"; \
		$(BIN)/python "$$script" --json > "out/bench/$$(basename "$$script" .py).json" || failed="$$failed $$script"; \
		cat "out/bench/$$(basename "$$script" .py).json"; \
	done; if [ -n "$$failed" ]; then echo "these failed, or missed a goal:$$failed" >&2; exit 1; fi

gpu: $(READY) ## the mechanisms on this host's GPU; figures in out/bench/gpu/gpu.json; parts of it with FLAGS="--part 1"
	$(BIN)/python -m benchmarks.gpu $(FLAGS)

papers: $(READY) ## published evaluations done again, out/bench/papers/; quickly with FLAGS=--quick
	@mkdir -p out/bench/papers
	@for script in $$(grep -l __main__ benchmarks/papers/*.py | grep -v _figures); do \
		echo "== $$script"; \
		$(BIN)/python "$$script" $(FLAGS) --json > "out/bench/papers/$$(basename "$$script" .py).json" || exit 1; \
	done

# The lock names the public version of torch without its local label (+cpu, +cu128), so that one file serves hosts with
# and without a GPU; the CUDA libraries that a GPU build brings are pinned exactly by torch itself.
lock: ## resolve pyproject.toml anew in a clean environment and rewrite requirements.lock, and that of the .deb with hashes
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[dev]'
	{ echo "# Made by \`make lock\` from pyproject.toml; do not edit."; \
	  build/lock/bin/python -m pip freeze --exclude-editable | sed -E 's/\+[A-Za-z0-9.]+$$//'; } > build/requirements.lock
	mv build/requirements.lock requirements.lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	build/lock/bin/uv pip compile --quiet --universal --generate-hashes --no-annotate --constraint requirements.lock \
		--python-version 3.11 $(DEB_EXTRAS:%=--extra %) --custom-compile-command "make lock" \
		--output-file packaging/deb/requirements.lock pyproject.toml
	rm -rf build/lock

# setuptools would take stale files out of build/.
wheels: $(READY) ## both wheels, gpu-arbiter and gpu-arbiter-session, in dist/
	rm -rf build packaging/session/build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist \
		. ./packaging/session

deb: $(READY) ## a Debian package for the Python of this host, in dist/: program, units, accounts
	$(BIN)/python packaging/deb/build.py

lab: $(READY) store ## a site on seven hosts, which are network namespaces; prints how to use it, and how to cut its cables (root)
	$(BIN)/python -m tests.lab

clean: ## remove everything that was made
	rm -rf $(VENV) build packaging/session/build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
