# shellcheck shell=bash
# Sourced by quickstart.sh, tests/run.sh and .ci/run: finds a Python, makes an environment with the
# pinned versions of torch and megatron-core, installs this package into it.
#
# An environment counts as complete once its stamp is written; where its first making was
# interrupted it is made anew. One that works is never removed: another Python gets an environment
# of its own. A directory that none of these scripts made is never touched.

mcb_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Versions of Python that will do, the best first; a script that needs more leaves some out.
mcb_versions=(3.12 3.11 3.13)

mcb_fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# "3.12" for an interpreter that runs; nothing otherwise.
mcb_version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# The pins for a Python version; fails for one that no pinned megatron-core supports.
mcb_constraints_of() {
    case $1 in
        3.11) echo "$mcb_root/examples/constraints-py311.txt" ;;
        3.12 | 3.13) echo "$mcb_root/examples/constraints-py312.txt" ;;
        *) return 1 ;;
    esac
}

mcb_will_do() { # VERSION
    case " ${mcb_versions[*]} " in *" $1 "*) return 0 ;; *) return 1 ;; esac
}

# Make a folder, or say what to set where it cannot be written to, as in a clone that is read-only.
mcb_make_folder() { # DIRECTORY HOW
    { mkdir -p "$1" && [ -w "$1" ]; } 2>/dev/null ||
        mcb_fail "cannot write to $1: $2 another folder, one that can be written to"
}

# An interpreter of one version ("3.12"): on the path, or installed with pyenv.
mcb_python_of_version() {
    local candidate
    candidate=$(command -v "python$1") || candidate=
    if [ -n "$candidate" ] && [ "$(mcb_version_of "$candidate")" = "$1" ]; then
        echo "$candidate"
        return 0
    fi
    command -v pyenv >/dev/null || return 1
    for candidate in "$(pyenv root)/versions/$1".*/bin/python; do
        if [ "$(mcb_version_of "$candidate")" = "$1" ]; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

# $MCORE_BATCHING_PYTHON, or the best interpreter there is: versions that are tested first, what is
# on the path before what pyenv keeps aside.
mcb_find_python() {
    local name version python
    if [ -n "${MCORE_BATCHING_PYTHON:-}" ]; then
        version=$(mcb_version_of "$MCORE_BATCHING_PYTHON") ||
            mcb_fail "MCORE_BATCHING_PYTHON=$MCORE_BATCHING_PYTHON does not run"
        mcb_constraints_of "$version" >/dev/null ||
            mcb_fail "MCORE_BATCHING_PYTHON=$MCORE_BATCHING_PYTHON is Python $version; megatron-core" \
                "has wheels for 3.11, 3.12 and 3.13: name one of these"
        command -v "$MCORE_BATCHING_PYTHON"
        return 0
    fi
    for name in "${mcb_versions[@]/#/python}" python3 python; do
        if version=$(mcb_version_of "$name") && mcb_will_do "$version"; then
            command -v "$name"
            return 0
        fi
    done
    for version in "${mcb_versions[@]}"; do
        if python=$(mcb_python_of_version "$version"); then
            echo "$python"
            return 0
        fi
    done
    mcb_fail "found no Python of version ${mcb_versions[*]} (looked on the path and in pyenv):" \
        "install one, or name it in MCORE_BATCHING_PYTHON"
}

# What an environment's packages depend on: pins, declared dependencies, Python version.
mcb_environment_key() { # PYTHON
    local constraints
    constraints=$(mcb_constraints_of "$(mcb_version_of "$1")") || return 1
    "$1" - "$mcb_root/pyproject.toml" "$constraints" <<'PYTHON'
import hashlib, json, pathlib, sys, tomllib

project = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
declared = {
    "build": project["build-system"],
    "dependencies": project["project"].get("dependencies"),
    "extras": project["project"].get("optional-dependencies"),
    "scripts": project["project"].get("scripts"),
    "pins": pathlib.Path(sys.argv[2]).read_text(),
    "python": sys.version,
}
print(hashlib.sha256(json.dumps(declared, sort_keys=True).encode()).hexdigest()[:12])
PYTHON
}

# The version of an environment that these scripts completed and that still runs; else nothing.
mcb_complete_version_of() { # DIRECTORY
    local version
    [ -f "$1/mcore_batching.complete" ] || return 0
    version=$(mcb_version_of "$1/bin/python") || return 0
    # Under an interpreter that was replaced by a newer version the packages are out of reach.
    [ ! -d "$1/lib/python$version" ] || echo "$version"
}

# Make an environment that has this package with EXTRAS ("megatron,plot"), if there is none, and set
# mcb_environment to it: DIRECTORY, or DIRECTORY-3.12 beside it where DIRECTORY has another version
# than $MCORE_BATCHING_PYTHON, or one that will not do. Afterwards $mcb_environment/bin/python runs.
mcb_ensure_environment() { # DIRECTORY EXTRAS
    local directory=$1 extras=$2 python found version key stamp unfinished has_key has_root has_extras
    local extra missing
    found=$(mcb_complete_version_of "$directory")
    if [ -z "$found" ] || [ -n "${MCORE_BATCHING_PYTHON:-}" ] || ! mcb_will_do "$found"; then
        python=$(mcb_find_python) || exit 1
        version=$(mcb_version_of "$python")
        while [ -n "$found" ] && [ "$found" != "$version" ]; do
            directory=$directory-$version # the other one, which works, stays as it is
            found=$(mcb_complete_version_of "$directory")
        done
    fi
    [ -z "$found" ] || python=$directory/bin/python
    mcb_environment=$directory
    stamp=$directory/mcore_batching.complete
    unfinished=$directory/mcore_batching.unfinished
    key=$(mcb_environment_key "$python") || mcb_fail "$python is no usable Python"

    if [ -n "$found" ]; then
        { read -r has_key; read -r has_root; read -r has_extras; } <"$stamp"
        missing=
        for extra in ${extras//,/ }; do
            case ",$has_extras," in *",$extra,"*) ;; *) missing=$extra ;; esac
        done
        [ "$has_key$has_root$missing" = "$key$mcb_root" ] && return 0
        extras=$(printf '%s\n' "$extras,$has_extras" | tr , '\n' | sort -u | paste -sd, -)
        # No key until all is installed: an interrupted change is made again.
        printf '%s\n' changing "$has_root" "$has_extras" >"$stamp"
    elif [ -f "$stamp" ] || [ -f "$unfinished" ]; then
        echo "$directory was left unfinished, or its Python is gone; making it anew"
        rm -rf "$directory"
    elif [ -n "$(ls -A "$directory" 2>/dev/null)" ]; then
        mcb_fail "$directory exists and is not an environment that these scripts made: remove it," \
            "or name another directory in MCORE_BATCHING_VENV"
    fi

    if [ -z "$found" ]; then
        mcb_make_folder "$directory" 'set MCORE_BATCHING_VENV to'
        echo "making $directory with $("$python" --version) ($python)"
        touch "$unfinished"
        "$python" -m venv "$directory" ||
            mcb_fail "$python cannot make environments (on Debian and Ubuntu: install python3-venv)"
    fi
    mcb_install "$directory/bin/python" "$extras" ||
        mcb_fail "installing into $directory failed (see above); run again once the cause is gone"
    printf '%s\n' "$key" "$mcb_root" "$extras" >"$stamp"
    rm -f "$unfinished"
}

mcb_install() { # PYTHON EXTRAS
    local python=$1 extras=$2 quiet=--quiet constraints what=(--editable "${mcb_root}[$2]") copy
    constraints=$(mcb_constraints_of "$(mcb_version_of "$python")") || return 1
    [ -t 1 ] && quiet=--progress-bar=on
    echo "installing mcore_batching[$extras] and $(grep -v '^#' "$constraints" | paste -sd' ' -)" \
        "(torch is large: minutes, the first time)"
    if ! [ -w "$mcb_root" ]; then
        # Building writes beside the sources. The scripts run the clone itself, by PYTHONPATH.
        copy=$(mktemp -d) || return 1
        cp -R "$mcb_root"/{pyproject.toml,README.md,LICENSE,mcore_batching} "$copy" || return 1
        what=("${copy}[$extras]")
    fi
    # The build needs no environment of its own, so that a later run needs no network.
    "$python" -m pip install "$quiet" --disable-pip-version-check 'setuptools>=77' &&
        "$python" -m pip install "$quiet" --disable-pip-version-check --no-build-isolation \
            --constraint "$constraints" "${what[@]}"
}
