# `make` lists what there is to do. One thing after the other, and the first failure ends it.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run install day test lint sim model estimates fuzz bench bench-tools clean tools

# Seeds of `make sim`: so many, from this one on.
SEEDS ?= 20000
START ?= 0
# How long `make fuzz` takes over each target.
SECONDS_EACH ?= 60
# Arguments of `make bench` and `make model`, e.g. ARGS='core --keys 1000'.
ARGS ?=

# The tests' own build of the simulator, with debug assertions and overflow checks.
CHECKED_SIM := cargo run -q --profile test -p evenhand-sim --

help: ## list the targets
	@awk -F ':.* ## ' '/^[a-z-]+:.* ## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## a server and a worker to play with, data in ./evenhand-data
	cargo build --release -p evenhand-cli
	target/release/evenhand dev

install: ## put evenhand into ~/.cargo/bin
	cargo install --path crates/cli --locked

day: ## a simulated day in the life of four tenants
	cargo run --release -q -p evenhand-sim -- day

test: tools lint ## everything that must pass before a commit
	cargo test --workspace
	scripts/rest-contract target/debug/evenhand
	$(CHECKED_SIM) run --seeds 300
	$(CHECKED_SIM) run --seeds 40 --disk
	$(CHECKED_SIM) canaries
	@echo 'make test: all passed'

# The core is looked at twice: with its deliberate bugs (the simulator turns them on for the whole
# workspace), and as it ships.
lint: ## formatting, lints, and the proof that the core's bans work
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy -p evenhand-core -- -D warnings
	scripts/lint-proof

sim: ## a long simulation: SEEDS=20000 START=0
	cargo run --release -q -p evenhand-sim -- run --seeds $(SEEDS) --start $(START)

model: ## everything that can happen among three workers: ARGS='--rebirths 2'
	cargo run --release -q -p evenhand-sim -- model $(ARGS)

estimates: ## how good estimates are: a table over simulated loads
	cargo run --release -q -p evenhand-sim -- estimates

fuzz: ## look for bytes that break a decoder: SECONDS_EACH=60
	scripts/fuzz $(SECONDS_EACH)

# Built on its own: with the simulator in the same build the core would carry its deliberate bugs.
bench: $(if $(filter core memory window growth timers workers limits store help --help -h,$(ARGS)),,bench-tools) ## measure core, store and server: ARGS='core --keys 1000', or ARGS=--help
	cargo run --release -p evenhand-bench -- $(ARGS)

# What `bench` compares: the server, built on its own for the same reason, and beanstalkd.
bench-tools:
	cargo build --release -p evenhand-cli
	@command -v beanstalkd >/dev/null || { apt-get update && apt-get install -y --no-install-recommends beanstalkd; }

clean: ## remove what was built
	cargo clean

# What the tests need beside cargo, added where it is missing.
tools:
	@cargo --version >/dev/null || { echo 'Install Rust first: https://rustup.rs' >&2; exit 1; }
	@cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
	@cargo clippy --version >/dev/null 2>&1 || rustup component add clippy
	@command -v strace >/dev/null && command -v promtool >/dev/null && command -v curl >/dev/null && \
		command -v ip >/dev/null || \
		{ apt-get update && apt-get install -y --no-install-recommends strace prometheus curl iproute2; }
	@{ test -x /usr/lib/postgresql/15/bin/postgres && test -x /usr/sbin/pgbouncer; } || scripts/install-postgresql
