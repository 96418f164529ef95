#!/usr/bin/env bash
# From a fresh checkout to the demonstration: environment, model, both nodes, answers, timeline.
# The first run installs and downloads; later ones start at once. Options are those of scripts/demo.py.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_environment.sh"

arguments=" $* "
if [[ "$arguments" != *" --emulated "* && "$arguments" != *" --model"* && "$arguments" != *" --help "* ]]; then
    "$python" "$repository/scripts/fetch_model.py" >&2
fi
exec "$python" "$repository/scripts/demo.py" "$@"
