#!/usr/bin/env bash
# From a fresh checkout to the verdict: environment, lint, all tests. Options are passed to pytest.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_environment.sh"

cd "$repository"
"$python" scripts/fetch_model.py >&2
"$python" -m ruff check .
"$python" -m ruff format --check .
exec "$python" -m pytest --numprocesses 3 --dist loadfile "$@"
