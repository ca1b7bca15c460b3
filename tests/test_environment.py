"""The packages that `make` installs: those of training, extras where a target needs them, every one pinned."""

import os
import re
import shlex
import tomllib

import pytest

from tests.starts import ROOT, ended

EXTRAS = ("data", "digits", "images", "logging", "dev")


def requirements(name):
    """Package and version of each line of a requirements file, those that it includes left out."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if match := re.match(r"([A-Za-z][\w.-]*)\s*([=<>][^;]*)", line):
            found[match[1].lower().replace("_", "-")] = match[2].strip()
    return found


def names(lines):
    return {re.split(r"[<>=\[]", line)[0].lower() for line in lines}


def planned(target, folder, *variables, status=0):
    """The commands that make would run for a target, with a fresh environment in ``folder``, or its refusal."""
    # A `make test` that this may run under hands its own variables on.
    own = ("MAKE", "MFLAGS", "PY", "VENV", "RUN", "CONFIG", "NPROC", "ARGS", "EXTRAS", "TORCH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = ["make", "--dry-run", target, f"VENV={folder}", *variables]
    done = ended(command, inherited=environment)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def test_training_installs_nothing_that_training_does_without():
    heavy = {"wandb", "tensorboard", "transformers", "diffusers", "datasets", "pandas", "scikit-learn", "pytest"}
    assert not heavy & set(requirements("requirements.txt"))
    assert heavy - {"pandas"} <= {name for extra in EXTRAS for name in requirements(f"requirements-{extra}.txt")}


def test_the_project_names_what_the_files_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert names(project["dependencies"]) - {"torch"} == set(requirements("requirements.txt"))
    assert set(project["optional-dependencies"]) == set(EXTRAS)
    for extra in EXTRAS:
        listed = names(project["optional-dependencies"][extra]) - {"longmesh"}
        assert listed == set(requirements(f"requirements-{extra}.txt")), extra


@pytest.mark.parametrize("name", ["requirements.txt", *(f"requirements-{extra}.txt" for extra in EXTRAS)])
def test_every_requirement_is_locked(name):
    locked = requirements("requirements-lock.txt")
    for package, version in requirements(name).items():
        if package != "triton":  # comes with torch, as the lock's head says
            assert version == f"=={locked[package].removeprefix('==')}", package


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("venv", set()),
        ("pretrain", set()),
        ("dit", {"digits"}),
        ("check", {"dev"}),
        ("test", {"dev"}),
        ("lock", {"dev"}),
    ],
)
def test_a_target_installs_what_it_needs(target, extras, tmp_path):
    commands = planned(target, tmp_path)
    assert "-r requirements.txt" in commands
    assert set(re.findall(r"-r requirements-(\w+)\.txt", commands)) == extras


def test_extras_can_be_asked_for_and_an_environment_of_ones_own_is_left_alone(tmp_path):
    commands = planned("venv", tmp_path, "EXTRAS=images logging")
    assert set(re.findall(r"-r requirements-(\w+)\.txt", commands)) == {"images", "logging"}
    assert "pip install" not in planned("test", tmp_path, "PY=python3")


VARIABLES = ("RUN", "CONFIG", "NPROC", "ARGS", "EXTRAS", "PAPERS", "VENV", "PY", "PYTHON", "TORCH")


@pytest.mark.parametrize(
    "text",
    [
        *(f"a{between}touch FOUND" for between in ("\n", "\r", "\x1b", "\x85", "\u2028", "\u2029", ";", "&", "|")),
        *("$(touch FOUND)", "$(shell touch FOUND)", "`touch FOUND`", "a\\", "a\nb: ; touch FOUND"),
    ],
)
def test_no_variable_becomes_a_command(text, tmp_path):
    line = planned("pretrain", tmp_path, *(f"{name}={text}" for name in VARIABLES), status=2)
    names = " ".join(sorted(VARIABLES))
    assert re.search(rf"Makefile:\d+: \*\*\* {names} has a character that a shell would act on", line), line
    assert line.count("\n") == 1
    assert not (ROOT / "FOUND").exists()


@pytest.mark.parametrize(
    "text", [") touch FOUND #", "(touch FOUND)", "# x", '"', "a' b", '"a\'b" ) touch FOUND # "c\'d"', "-k (a)"]
)
def test_brackets_quotes_and_comments_of_flags_are_whole_words(text, tmp_path):
    line = planned("pretrain", tmp_path, f"ARGS={text}", status=2)
    assert re.search(r"Makefile:\d+: \*\*\* ARGS has a character that a shell would act on", line), line
    quoted = f"ARGS=-k {shlex.quote(text)}" if "'" not in text else f"ARGS=-k 'x{text.count(chr(39))}'"
    assert "pretrain_gpt.py" in planned("pretrain", tmp_path, quoted)


def test_quotes_and_blanks_of_variables_stay_words(tmp_path):
    given = (
        "TORCH=torch>=2.11,<2.14 --pre",
        "ARGS=--lr '1 (e)' -x",
        "RUN=runs/\u00e9 1",
        "NPROC=2",
        "EXTRAS=dev images",
    )
    assert """'torch>=2.11,<2.14' '--pre'""" in planned("venv", tmp_path, *given)
    assert planned("test", tmp_path, "ARGS=-m 'slurm and not slow'").endswith(" -m 'slurm and not slow'\n")
    names = sorted({*VARIABLES} - {"ARGS"})
    assert " ".join(names) in planned("pretrain", tmp_path, *(f"{name}=-x" for name in VARIABLES), status=2)
