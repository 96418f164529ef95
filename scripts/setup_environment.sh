# Prepares .venv with everything that Tandem needs; sourced by demo.sh and test.sh, which then use "$python".
#
# It installs once: a stamp in .venv remembers what the environment was made from (the pinned versions, the
# package's own dependencies, the Python), and as long as that is unchanged it returns at once. A half-made
# environment has no stamp and is completed. Nothing outside the repository is changed.
#
# PYTHON names the Python to use, when none that is new enough is found by itself.

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
environment="$repository/.venv"
python="$environment/bin/python"

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 2
}

# The first Python that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "Tandem needs Python 3.11 or newer, and ${PYTHON:-python3} is not: install one, or name it, as in PYTHON=/path/to/python3.12 $0"
}

# What the environment is made from; a difference means that it is made again.
stamp_of() {
    cat "$repository/constraints.txt" "$repository/setup.cfg" "$repository/pyproject.toml"
    "$1" -c 'import sys, sysconfig; print(sys.version, sysconfig.get_platform())'
    printf '%s\n' "$repository"
}

run_pip() {
    "$python" -m pip --disable-pip-version-check "$@"
}

# Whether pip, left to itself, would take a torch that brings CUDA: several GB that nothing here uses.
torch_is_large() {
    [[ "$(uname -s)" == Linux ]] || return 1
    local report
    report="$(run_pip install --quiet --dry-run --no-deps --ignore-installed --report - "$1" 2>/dev/null)" || return 0
    ! grep -q '"version": "[^"]*+cpu"' <<<"$report"
}

# The version of torch in the environment, without the name of its build.
torch_version() {
    "$python" -c 'import importlib.metadata; print(importlib.metadata.version("torch").split("+")[0])' 2>/dev/null
}

install_torch() {
    local torch cpu_builds="https://download.pytorch.org/whl/cpu"
    torch="$(grep '^torch==' "$repository/constraints.txt")"
    [[ "$(torch_version)" != "${torch#torch==}" ]] || return 0
    if ! torch_is_large "$torch"; then
        run_pip install --no-deps "$torch"
        return
    fi
    say "installing $torch for CPUs from $cpu_builds; where that is out of reach, the package index has a"
    say "build of several GB ..."
    # The name of a CPU build sorts above the plain version. One try only: pip goes on without this index.
    run_pip install --no-deps --extra-index-url "$cpu_builds" --retries 0 --timeout 15 "$torch" ||
        run_pip install --no-deps "$torch"
}

prepare_environment() {
    local base stamp
    base="$(find_python)"
    stamp="$(stamp_of "$base")"
    [[ "$(cat "$environment/stamp" 2>/dev/null)" != "$stamp" ]] || return 0
    rm -f "$environment/stamp"
    say "preparing $environment with $base; this is done once and takes some minutes ..."
    if ! "$base" -m venv "$environment" >&2; then
        rm -rf "$environment"
        fail "$base cannot make virtual environments: on Debian and Ubuntu, install python3-venv"
    fi
    {
        run_pip install -c "$repository/constraints.txt" setuptools &&
            install_torch &&
            run_pip install -c "$repository/constraints.txt" --no-build-isolation -e "$repository[test]"
    } >&2 || fail "pip could not install everything (see above): is there a network, and room on the disk? Run this again to go on where it stopped"
    printf '%s\n' "$stamp" >"$environment/stamp"
}

prepare_environment
