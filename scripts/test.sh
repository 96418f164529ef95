#!/usr/bin/env bash
# From a fresh checkout to the verdict: environment, lint, all tests. Options are passed to pytest.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_environment.sh"

cd "$repository"
"$python" scripts/fetch_model.py >&2
"$python" -m ruff check .
"$python" -m ruff format --check .

# The tests start hundreds of processes. Compiled modules and no idle threads of a numerical library
# spare each of them a third of its start, whatever the caller's environment says.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$repository/.venv/bytecode" OPENBLAS_NUM_THREADS=1
exec "$python" -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
