"""No text of a flag or a file becomes a line or a command of the script: refused, or inert."""

import json
import os
import shlex
import subprocess
from dataclasses import fields

import pytest

from slurm import site, submit
from tests.slurm.test_submit import CLUSTERS, RUN, write_cluster

BREAKS = ("\n", "\x1b[2J", "\u2028", "\udcff")
HOSTILE = (
    *(f"x{between}touch FOUND" for between in BREAKS),
    *(
        "$(touch FOUND)",
        "x;touch FOUND",
        "x # y",
        "x --wrap=y",
        "';touch FOUND;'",
        '";touch FOUND;"',
        "x\\",
    ),
)


def texts():
    """The flags of a job whose value is any text."""
    actions = submit.build_parser()._actions
    return [
        action.dest
        for action in actions
        if action.nargs != 0 and not (action.choices or action.type)
    ]


def inert(text, folder):
    """True if all lines for sbatch have a word each, and bash runs nothing but the training."""
    options = [line for line in text.split("\n") if line.startswith("#SBATCH")]
    keys = {shlex.split(line)[1].split("=")[0] for line in options if len(shlex.split(line)) == 2}
    stub = text.replace("source slurm/job.sh", "train() { touch trained; }")
    settings = {
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_ARRAY_TASK_ID": "0",
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(
        ["bash"], input=stub, cwd=folder, env=settings, capture_output=True, text=True, check=False
    )
    names = sorted(path.name for path in folder.iterdir())
    return (
        len(keys) == len(options)
        and not done.stderr
        and "--wrap" not in keys
        and names == ["trained"]
    )


def refused_or_inert(arguments, name, text, folder, capsys):
    """Assert that a text is refused in a line with its name, or does nothing in the script.

    What does not print is.
    """
    status = submit.main(["--dry-run", *arguments])
    out, err = capsys.readouterr()
    if status == 0:
        (folder / "bare").mkdir()
        assert inert(out, folder / "bare"), (name, text, out)
        assert text.isprintable(), (name, text)
    else:
        (line,) = err.split("\n")[:-1]
        assert line.startswith("error: "), (name, text, err)
        assert name in line, (name, text, err)
        assert line.isprintable(), (name, text, err)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_flag_becomes_a_line_or_a_command_of_the_script(text, tmp_path, capsys):
    assert {
        "name",
        "partition",
        "account",
        "after",
        "container",
        "container_mounts",
        "option",
        "array",
    } < {*texts()}
    job = ["--cluster", str(CLUSTERS / "h100_pod.toml"), "--nodes", "1"]
    for name in texts():
        argument = f"--exclude={text}" if name == "option" else text
        flag = [
            f"--{name.replace('_', '-')}={argument}",
            *(["--container=i"] if name == "container_mounts" else []),
        ]
        words = {
            "command": [*RUN, "--tokenizer-model", text],
            "array": ["--array", f"--tokenizer-model {text}", "--", *RUN],
        }
        (tmp_path / name).mkdir()
        message = {
            "command": "tokenizer-model",
            "array": "array" if not text.isprintable() else "",
        }.get(name, name)
        refused_or_inert(
            [*job, *words.get(name, [*flag, *RUN])], message, text, tmp_path / name, capsys
        )
    for name, words in {
        "save": [*RUN, "--save", text],
        "--save": [*RUN, f"--save=runs/{text}"],
    }.items():
        (tmp_path / name).mkdir()
        refused_or_inert([*job, "--name", "x", *words], "save", text, tmp_path / name, capsys)


@pytest.mark.parametrize(
    "text", [text for text in HOSTILE if "\udcff" not in text]
)  # no TOML has it
def test_no_key_of_a_file_becomes_a_line_or_a_command_of_the_script(text, tmp_path, capsys):
    for entry in fields(site.Site):
        (tmp_path / entry.name).mkdir()
        file = write_cluster(tmp_path / "cluster.toml", **{entry.name: text})
        job = ["--cluster", str(file), "--nodes", "1", *RUN]
        refused_or_inert(job, entry.name, text, tmp_path / entry.name, capsys)
    (run := tmp_path / "run.toml").write_text(f"[checkpoint]\nsave = {json.dumps(text)}\n")
    job = [
        "--cluster",
        str(CLUSTERS / "h100_pod.toml"),
        "--nodes",
        "1",
        "--name",
        "x",
        RUN[0],
        "--config",
        str(run),
    ]
    (tmp_path / "run").mkdir()
    refused_or_inert(
        job, f"{run}: save" if not text.isprintable() else "", text, tmp_path / "run", capsys
    )
