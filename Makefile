# Everything a user or CI starts. `make` alone prints the targets.
#
# Variables, as in `make pretrain RUN=runs/second ARGS="--lr 1e-3"`:
#   RUN     folder of the run, by default runs/ and the name of CONFIG            ARGS  more flags for the program
#   CONFIG  TOML file of `make pretrain`            NPROC its processes; default 4 on a CPU, one for each GPU (at most 8)
#   BENCH   program of `make bench`: attention, documents, linear, memory or optimizers, and with root link, link.attention or link.documents
#   TORCH   torch to install: a requirement and pip's options, remembered in the environment. PyPI's build for Linux carries
#           CUDA; TORCH="torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu" is small and for the CPU only
#   EXTRAS  more to install with `make venv`: data, digits, images, logging, video, docs, dev, peers, ringmaster (targets that need one install it)
#   PYTHON  interpreter that the environment is made with, 3.11 or newer          PY    one that has everything, to use instead of .venv

VENV   ?= .venv
CONFIG ?= configs/models/llama_tiny.toml
RUN    ?= runs/$(patsubst %.toml,%,$(notdir $(CONFIG)))
BENCH  ?= attention
PAPERS ?= striped ring wallfacer lasp records sizes errors

# The stamp holds the TORCH that is installed. Another one replaces it, and pip must be told to: 2.13.0+cpu satisfies 2.13.0.
STAMP     := $(VENV)/.longmesh-torch
INSTALLED := $(shell cat $(STAMP) 2>/dev/null)
TORCH     ?= $(or $(INSTALLED),torch==2.13.0)
REPLACE    = $(and $(INSTALLED),$(filter-out $(INSTALLED),$(TORCH))$(filter-out $(TORCH),$(INSTALLED)))
SUITABLE  := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON    ?= $(shell for p in python3 python3.12 python3.11 python3.13; do $$p -c "$(SUITABLE)" 2>/dev/null && echo $$p && break; done)
suitable   = test -n "$(PYTHON)" && $(PYTHON) -c "$(SUITABLE)" || { echo "error: no Python of 3.11 or newer with its venv module found (PYTHON is" \
	       "'$(PYTHON)'); install one (Debian: apt-get install python3.11-venv), and name it: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
PIP       := $(VENV)/bin/python -m pip --disable-pip-version-check
READY     := $(if $(PY),,$(STAMP))
PY        := $(or $(PY),$(VENV)/bin/python)
extra      = $(if $(READY),$(VENV)/.longmesh-$(1))

# Single-threaded ranks: several per machine would otherwise fight over its cores.
RANKS = OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node

# $(call start,ENTRY): what tools/fit.py finds for this machine, its number of processes first, and then the entry so.
start = fit=$$(NPROC="$(NPROC)" $(PY) -m tools.fit $(1) --config "$(CONFIG)" $(ARGS)) && more=$$(echo "$$fit" | cut -s -d " " -f 2-) && \
	  set -x && $(RANKS) $${fit%% *} $(1) --config "$(CONFIG)" $$more --save "$(RUN)" --load "$(RUN)" $(ARGS)

# Tests start many interpreters, which keep what they compile; kernels of each generation of processors add in another order.
TESTS  = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(AS_CPU) $(PY) -m pytest
sse4   = ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
avx2   = ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
AS_CPU = $(if $(CPU),$(if $(filter sse4 avx2,$(CPU)),$($(CPU)),$(error CPU is '$(CPU)'; give sse4 or avx2, or leave it out)))

.PHONY: help venv pretrain finetune ruler dit test test-slow check format docs bench peers model-peers papers parity chaos lasp-table rl-table gpu-check gpu-profile nccl-check cuda-stub hooks lock clean FORCE

help: ## Print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo; sed -n '2,/^$$/s/^# \{0,1\}//p' $(MAKEFILE_LIST)
venv: $(STAMP) $(EXTRAS:%=$(VENV)/.longmesh-%) ## Make .venv with what training needs, pinned (the other targets do so by themselves)
$(STAMP): pyproject.toml constraints.txt $(if $(REPLACE),FORCE)
	@$(suitable)
	@echo "installing $(TORCH) and what training needs into $(VENV) with $$($(PYTHON) --version)"; rm -f $(STAMP)
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(if $(REPLACE),@$(PIP) uninstall --quiet --yes torch)
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(PIP) install -c $(VENV)/constraints.txt $(foreach word,$(TORCH),'$(word)')
	@$(PIP) install --quiet -c $(VENV)/constraints.txt --editable .
	@echo "$(TORCH)" > $(STAMP)
$(VENV)/.longmesh-%: $(STAMP)
	@$(if $(filter $*,data digits images logging video docs dev peers ringmaster),,$(error EXTRAS has '$*'; give some of data, digits, images, logging, video, docs, dev, peers, ringmaster))echo "installing the extra $* into $(VENV)"
	@$(PIP) install --quiet -c $(VENV)/constraints.txt --editable ".[$*]" && touch $@

pretrain: $(READY) ## The main job: text, tokenizer, training, sampling. Goes on where RUN holds a checkpoint
	$(PY) -m tools.prepare_data
	@$(call start,pretrain_gpt.py)
	$(PY) -m tools.sample --load "$(RUN)"
finetune ruler: RUN = runs/$@
finetune: ## A tiny LLaMA of transformers, or MODEL=qwen3_5, trained to retrieve one line of a text of 1K tokens, extended to 4K, scored, exported (half an hour)
ruler: ## A tiny LLaMA trained from random weights on RULER's single needles at 1K tokens, scored there and beyond (a quarter of an hour)
finetune ruler: $(call extra,dev)
	PY="$(PY)" NPROC="$(NPROC)" MODEL="$(MODEL)" PERCENT="$(PERCENT)" bash configs/runs/$@_tiny.sh "$(RUN)"
dit: CONFIG = configs/models/dit_tiny.toml
dit: $(READY) $(call extra,digits) ## A diffusion transformer on handwritten digits, then pictures. Goes on where RUN holds a checkpoint
	@$(call start,pretrain_dit.py) && $(RANKS) $${fit%% *} -m tools.sample_dit --load "$(RUN)" --guidance 2

test: $(call extra,dev) ## The tests, but for the slow ones, in up to 4 processes; ARGS="tests/train -k config" chooses; CPU=sse4 computes as without AVX, CPU=avx2 as without AVX-512
	$(TESTS) -n auto --dist loadfile --no-loadscope-reorder $(ARGS)
test-slow: $(call extra,dev) ## The slow tests: for example, training for 20 and 40 iterations where make test trains 3 and 4
	$(TESTS) -m slow $(ARGS)
check: $(call extra,dev) ## Check format, lint, types and the links of all pages
	@status=0; for step in "ruff format --check ." "ruff check ." mypy "pytest tests/test_docs.py -k links"; do \
	  echo "$$step"; $(PY) -m $$step || status=1; done; exit $$status
format: $(call extra,dev) ## Rewrite the sources in the format that check wants, with ruff's safe fixes
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .
docs: $(if $(READY),$(VENV)-docs/.longmesh-docs) ## Build the pages as a site with search, without a network: site/index.html
	@NO_MKDOCS_2_WARNING=1 $(if $(READY),$(VENV)-docs/bin/python,$(PY)) -m mkdocs build $(ARGS)
# An environment of 200 MB, since mkdocstrings reads the sources without importing torch.
$(VENV)-docs/.longmesh-docs: pyproject.toml constraints.txt
	@$(suitable)
	@echo "installing what the site needs into $(VENV)-docs"; $(PYTHON) -m venv $(VENV)-docs
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' | \
	  $(VENV)-docs/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -r /dev/stdin
	@touch $@

bench: $(READY) ## Time the attention: every method on 2 processes, compared with one; BENCH=documents, linear, memory, optimizers, link, link.attention or link.documents runs another program
	$(PY) -m bench.$(BENCH) $(ARGS)
peers: $(call extra,peers) ## Measure attention and training by us and by other packages, in one run, into bench/results/ (10 minutes)
	$(PY) -m bench.peers --results bench/results $(ARGS)
model-peers: $(call extra,dev) $(call extra,ringmaster) ## Models of transformers over 2 to 4 processes, by us and by axolotl-ringmaster, against one, into bench/results/ (20 minutes)
	OMP_NUM_THREADS=1 $(PY) -m tests.peers.run --results bench/results $(ARGS)
papers: $(READY) ## The papers' tables, published and predicted and, where it is cheap here, measured, into papers/results/; PAPERS="ring" chooses
	@for paper in $(PAPERS); do $(PY) -m papers.$$paper --measure --results papers/results $(ARGS) || exit 1; done
parity: MODULE = tests.parity.run ## A tiny LLaMA and GPT on up to 101 meshes of at most 8 processes against one, into runs/parity.md (25 minutes)
chaos: MODULE = tests.chaos ## Kill runs of 4 processes, send them signals and start them twice; compare the results with an undisturbed run, into bench/results/chaos.md (hours)
lasp-table: MODULE = papers.convergence ## LASP's table of convergence at small scale: 26 runs of 300 updates, into papers/results/ (20 minutes)
rl-table: MODULE = papers.trajectories.attempts ## Ring Attention's table of trajectories, at small scale: chains of 1 to 64 attempts, four runs, roll-outs, into papers/results/
nccl-check: MODULE = tests.nccl ## On 2 to 8 GPUs, step by step: links; every method, pipelines and meshes compared with one GPU; the end of a run with a killed rank; into bench/results/
parity chaos lasp-table rl-table nccl-check: $(READY)
	@OMP_NUM_THREADS=1 exec $(PY) -m $(MODULE) $(ARGS)

gpu-check: $(READY) ## On one CUDA device, step by step, in under 8 minutes: errors of kernels, all ranks of every method, waits of the host, speed, training of a 1B model; into bench/results/
	@$(if $(findstring --device cpu,$(ARGS)),,$(PY) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else \
	  'error: this needs a CUDA GPU, and torch sees none here; nothing was installed or written')")
	@$(if $(READY),$(MAKE) --no-print-directory $(call extra,dev))
	$(PY) -m tests.gpu $(ARGS)
gpu-profile: RUN = runs/gpu_profile_$(shell date +%m%d_%H%M%S)
gpu-profile: $(READY) ## On one CUDA device: a trace, and a table of idle time, of a LLaMA of 1B at 8,192 tokens; into RUN/profile
	PY="$(PY)" bash configs/runs/gpu_profile.sh "$(RUN)" $(ARGS)
cuda-stub: ## Every kind of configuration on stubbed GPUs, with a CUDA build of torch in an environment of its own: errors and memory
	@$(if $(READY),$(MAKE) --no-print-directory venv VENV=$(VENV)-cuda)
	OMP_NUM_THREADS=1 $(if $(READY),$(VENV)-cuda/bin/python,$(PY)) -m tests.cuda_stub.check $(ARGS)

hooks: $(call extra,dev) ## Let git run the checks before each commit
	$(PY) -m pre_commit install
lock: $(call extra,dev) $(call extra,docs) $(call extra,peers) $(call extra,ringmaster) ## Write constraints.txt from the environment
	@{ sed -n '/^#/p' constraints.txt; { $(PY) -m pip freeze --all --exclude-editable | \
	     grep -viE '^(torch|triton|nvidia-.*|cuda-.*|pip)=='; grep '^torch==' constraints.txt; } | sort -f; } > constraints.tmp && mv constraints.tmp constraints.txt
clean: ## Remove the environments, the site and the caches; runs/ stays
	rm -rf $(VENV) $(VENV)-cuda $(VENV)-docs site .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
