"""The packages that `make` installs.

Those of training, extras where a target needs them, every one pinned.
"""

import os
import re
import tomllib

import pytest

from tests.starts import ROOT, ended

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Triton comes with torch's builds for CUDA, and longmesh is this project.
UNLOCKED = {"triton", "longmesh"}


def names(requirements):
    """Normalised names of requirements."""
    return {re.split(r"[<>=!\[; ]", line)[0].lower().replace("_", "-") for line in requirements}


def locked():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return names(line for line in lines if not line.startswith("#"))


def planned(target, folder, *variables, status=0):
    """The commands that make would run for a target, or its refusal.

    A fresh environment is in ``folder``.
    """
    # A `make test` that this may run under hands its own variables on.
    make_variables = (
        "MAKE",
        "MFLAGS",
        "PY",
        "VENV",
        "RUN",
        "CONFIG",
        "NPROC",
        "ARGS",
        "EXTRAS",
        "TORCH",
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(make_variables)
    }
    command = ["make", "--dry-run", target, f"VENV={folder}", *variables]
    done = ended(command, inherited=environment)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def test_what_training_does_without_is_an_extra_and_all_is_locked():
    heavy = {
        "wandb",
        "tensorboard",
        "transformers",
        "diffusers",
        "datasets",
        "scikit-learn",
        "pytest",
    }
    assert not heavy & names(PROJECT["dependencies"])
    assert heavy <= {name for extra in EXTRAS.values() for name in names(extra)}
    required = names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))
    assert required - UNLOCKED <= locked()


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("dit", {"digits"}),
        ("lock", {"dev", "docs", "peers", "ringmaster"}),
        ("model-peers", {"dev", "ringmaster"}),
    ],
)
def test_a_target_installs_what_it_needs(target, extras, tmp_path):
    commands = planned(target, tmp_path)
    assert "--editable .\n" in commands
    assert set(re.findall(r'--editable "\.\[(\w+)\]"', commands)) == extras


def test_the_site_is_built_in_an_environment_without_torch(tmp_path):
    commands = planned("docs", tmp_path / "venv")
    assert f"{tmp_path}/venv-docs/bin/python -m mkdocs build" in commands
    assert "--editable" not in commands
    assert "pip" not in planned("docs", tmp_path / "venv", "PY=python3")


def test_extras_can_be_asked_for_and_an_environment_of_ones_own_is_left_alone(tmp_path):
    commands = planned("venv", tmp_path, "EXTRAS=images logging")
    assert set(re.findall(r'--editable "\.\[(\w+)\]"', commands)) == {"images", "logging"}
    assert "pip install" not in planned("test", tmp_path, "PY=python3")


def test_quotes_and_blanks_of_variables_stay_words(tmp_path):
    assert """'torch>=2.11,<2.14' '--pre'""" in planned(
        "venv", tmp_path, "TORCH=torch>=2.11,<2.14 --pre"
    )
    assert planned("test", tmp_path, "ARGS=-m 'slurm and not slow'").endswith(
        " -m 'slurm and not slow'\n"
    )
