# One entry for a person and for CI. Every target first brings .venv up to date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests start hundreds of processes: each of them would compile all modules anew where this is set.
export PYTHONDONTWRITEBYTECODE :=

VIEWER := synth/viewer/web/viewer.js

.PHONY: install viewer demo test test-all durations coverage mutants map lint docs package lowest pages atlas format headline bench torch-suite clean

install: $(STAMP) $(VIEWER)

# The script of `synth view`, bundled with D3. All else works without.
viewer: $(VIEWER)

$(VIEWER): $(addprefix synth/viewer/web/,package.json package-lock.json tsconfig.json) $(wildcard synth/viewer/web/src/*.ts)
	@if command -v npm >/dev/null && (cd synth/viewer/web && npm ci --silent && npm run --silent build); then :; \
	else echo "synth view will not work here: npm (of Node.js 20 or newer) could not build its script" >&2; fi

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard backends/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Arborcast needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt --build-constraint constraints.txt -e '.[torch,viz,dev]'
	$(BIN)/python -m arborcast.synth.compile_kernels
	@touch $@

demo: install
	$(BIN)/python examples/demo.py

# Kernels that changed are compiled here, once, and not by every worker and every rank that comes to need them.
test: install
	$(BIN)/python -m arborcast.synth.compile_kernels
	$(BIN)/python -m pytest -n 4 --dist worksteal

test-all: install
	$(BIN)/python -m arborcast.synth.compile_kernels
	$(BIN)/python -m pytest -n 2 --dist worksteal -m '' --hypothesis-profile=explore; status=$$?; \
	$(BIN)/python tests/suite/all_passed.py --record $$status; exit $$status

# What the cases of tests take, for their budgets: all, or FOLDERS="group training". Other work on the machine does not matter.
durations: install
	$(BIN)/python -m arborcast.synth.compile_kernels
	$(BIN)/python -m pytest --measure $(addprefix tests/,$(FOLDERS))

coverage: install
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=html --cov-report=term

mutants: install
	$(BIN)/python tests/mutants.py

map:
	@$(PYTHON) tests/module_map.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/python bench/report.py --check
	$(BIN)/python docs/draw.py --check
	$(BIN)/python tests/suite/all_passed.py
	$(MAKE) docs
	$(BIN)/python -m tests.docs.look out/site

# Strict: a link or a reference that leads nowhere fails. The site is a folder that asks no other host.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# What people without a checkout get: sdist and wheel, and the demo from the wheel in an environment of its own.
package: install
	@test -f $(VIEWER) || { echo "the wheel needs $(VIEWER), which npm builds (make viewer)" >&2; exit 2; }
	rm -rf dist out/package
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv out/package
	out/package/bin/pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[torch,viz]"
	cd out && package/bin/python ../examples/demo.py --out demo-of-the-wheel
	cd out && package/bin/synth solve dgx1 allreduce --ranks 0-5 -o wheel.json && package/bin/synth view wheel.json --html wheel.html

# The core with the oldest packages that pyproject.toml allows, in an environment of its own.
CORE := $(addprefix tests/,values bounds packing chunks verification simulation formats topologies lowering dataflow)

lowest:
	rm -rf out/lowest
	$(PYTHON) -m venv out/lowest
	out/lowest/bin/pip install --quiet -c tests/lowest.txt -e '.[torch,viz]' dratify hypothesis jsonschema pytest pytest-timeout
	out/lowest/bin/python -m pytest $(CORE)

# What `make lint` compares: README's figures, docs/figures.md and the pictures, from bench/results and the code.
pages: install
	$(BIN)/python bench/report.py
	$(BIN)/python docs/draw.py

# A page for each machine of topologies/owned.py, those that are there and whose fabric and answers are the same apart.
atlas: install
	$(BIN)/synth atlas --catalog -o docs/atlas --deadline 300

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every number of README's section "Measured", in one run of some 45 minutes on two quiet cores. Without emulated
# links README keeps what was measured there before, and the status is 2.
headline: install
	@$(BIN)/python -m arborcast.bench.emulation.machine
	$(BIN)/python bench/synthesis.py
	$(BIN)/python bench/testbed.py; status=$$?; [ $$status -eq 0 ] || [ $$status -eq 2 ] || exit $$status; \
	$(BIN)/python bench/report.py && exit $$status

bench: install
	$(BIN)/python bench/synthesis.py
	$(BIN)/python bench/frontier.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/loopback.py
	$(BIN)/python bench/ddp.py
	# Status 2: this machine cannot emulate links, and the line says why.
	$(BIN)/python bench/testbed.py || [ $$? -eq 2 ]
	$(BIN)/python bench/switchless.py || [ $$? -eq 2 ]
	# The last of its parts needs such links, too.
	$(BIN)/python bench/pipeline.py || [ $$? -eq 2 ]
	# Other synthesizers are asked where their checkouts are named: make bench PEERS="--forestcoll PATH --tacos PATH".
	# Without, the results of the last time stay.
	$(if $(PEERS),$(BIN)/python bench/peers.py $(PEERS))
	$(BIN)/python bench/report.py --csv out/figures

# Torch's own tests over our groups and over gloo: an hour.
torch-suite: install
	$(BIN)/python bench/torch_suite.py

clean:
	rm -rf $(VENV) out build *.egg-info $(VIEWER) synth/viewer/web/node_modules
