"""A run's command, a cluster's file and a number of nodes make the script that was asked for."""

import json
import os
import re
import shlex
import subprocess

import pytest

from runtime.errors import UserError
from slurm import script, site, submit
from tests.endings import end
from tests.starts import ROOT

CLUSTERS = ROOT / "configs" / "clusters"
RUN = [
    "pretrain_gpt.py",
    "--config",
    str(ROOT / "configs" / "models" / "llama_tiny.toml"),
    "--global-batch-size",
    "64",
]
RUN += ["--save", "runs/here"]
IMAGE = ["--container", "i.sqsh", "--container-mounts", "/data:/data"]


def test_a_clusters_name_is_that_of_its_file(capsys):
    job = ["--dry-run", "--nodes", "1", *RUN]
    assert submit.main(["--cluster", "h100", *job]) == 0
    assert capsys.readouterr().out == printed(capsys, "--nodes", "1", *RUN)


def printed(capsys, *arguments, cluster="h100_pod"):
    assert (
        submit.main(["--cluster", str(CLUSTERS / f"{cluster}.toml"), "--dry-run", *arguments]) == 0
    )
    return capsys.readouterr().out


def test_the_script_has_what_was_asked_for_once(capsys):
    flags = (
        "--gpus 32 --time 4:00:00 --partition big --account us --lead 300 --after 12 "
        "--option=--exclude=bad"
    )
    text = printed(capsys, *flags.split(), "--launcher", "torchrun", *IMAGE, *RUN, "--lr", "2e-3")
    lines = text.splitlines()
    options = (
        "nodes=4 gres=gpu:h100:8 ntasks-per-node=8 time=4:00:00 partition=big account=us "
        "signal=B:USR1@300"
    )
    for line in (
        f"{options} dependency=afterok:12 exclude=bad requeue open-mode=append "
        f"job-name=here "
        f"comment=runs/here"
    ).split():
        assert lines.count(f"#SBATCH --{line}") == 1, line
    keys = [line.split("=")[0] for line in lines if line.startswith("#SBATCH")]
    assert len(keys) == len(set(keys))
    for line in (
        "LAUNCHER=torchrun",
        "CONTAINER=i.sqsh",
        "CONTAINER_RUNTIME=pyxis",
        "CONTAINER_MOUNTS=/data:/data",
    ):
        assert f"export {line}" in lines
    assert "export GPUS_PER_NODE=8" in lines
    assert lines[-1] == (
        f"train runs/here {RUN[0]} --device cuda --config {RUN[2]} --global-batch-size 64 --lr 2e-3"
    )
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


RESIZING = "--allow-resize --full-world-size 32"


@pytest.mark.parametrize(
    ("arguments", "cluster", "lines"),
    [
        (f"--nodes 4 --option=--nodes=2-4 RUN {RESIZING}", "h100_pod", ["#SBATCH --nodes=2-4"]),
        (
            "--nodes 1 RUN --save 'runs/my run'",
            "h100_pod",
            [
                "#SBATCH --job-name='my run'",
                "#SBATCH --comment='runs/my run'",
                "train 'runs/my run' pretrain_gpt.py",
            ],
        ),
        ("--nodes 1 --after 12 RUN", "h100_pod", ["#SBATCH --kill-on-invalid-dep=yes"]),
        (
            "--nodes 1 --after 12 --option=--kill-on-invalid-dep=no RUN",
            "h100_pod",
            ["#SBATCH --kill-on-invalid-dep=no"],
        ),
        (
            "--gpus 32 RUN",
            "wallfacer_a100_16",
            [
                "#SBATCH --nodes=2",
                "#SBATCH --gres=gpu:a100:16",
                "#SBATCH --ntasks-per-node=16",
                "export GPUS_PER_NODE=16",
            ],
        ),
        (
            "--nodes 1 RUN",
            "gb200_nvl72",
            ["# Train on GB200 NVL72, 4 GPUs a node; the job queues itself again"],
        ),
        (
            "--nodes 2 RUN",
            "mine",
            ["#SBATCH --cpus-per-task=7", "#SBATCH --constraint=hbm3", "#SBATCH --qos=long"],
        ),
        ("--nodes 2 RUN", "mine", ["export NCCL_SOCKET_IFNAME=ib0,ib1 GLOO_SOCKET_IFNAME=ib0,ib1"]),
    ],
)
def test_what_is_asked_of_a_job_or_a_cluster_is_in_the_script(
    arguments, cluster, lines, tmp_path, capsys
):
    """A key of sbatch stands there once, whether it is the script's own or an option's."""
    mine = write_cluster(
        tmp_path / "mine.toml", cpus_per_gpu=7, constraint="hbm3", qos="long", interface="ib0,ib1"
    )
    path = mine.with_suffix("") if cluster == "mine" else cluster
    text = printed(capsys, *asked_for(arguments), cluster=path)
    for line in lines:
        assert f"\n{line}" in text
        assert text.count(line.partition("=")[0] + "=") == 1 or not line.startswith("#SBATCH")


def asked_for(arguments):
    """The words of a command line, in which RUN stands for a run's."""
    return [part for word in shlex.split(arguments) for part in (RUN if word == "RUN" else [word])]


def test_a_sweep_is_an_array_with_a_folder_for_each_and_its_flags_may_hold_blanks(capsys):
    flags = ["--lr 1e-3", "--tokenizer-model 'my tokens.model' --seed 2"]
    text = printed(capsys, "--nodes", "1", "--array", *flags, "--", *RUN, cluster="a100_pod")
    assert "#SBATCH --array=0-1\n" in text
    assert 'train runs/here/"$SLURM_ARRAY_TASK_ID" pretrain_gpt.py ' in text
    assert text.endswith(' "${sweep[@]}"\n')
    chosen = text[text.index("case $SLURM") : text.index("esac")]
    command = ["bash", "-c", f'{chosen}esac\nprintf "%s\\n" "${{sweep[@]}}"']
    for number, words in enumerate(
        (["--lr", "1e-3"], ["--tokenizer-model", "my tokens.model", "--seed", "2"])
    ):
        environment = {"SLURM_ARRAY_TASK_ID": str(number)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == words


def write_cluster(path, **more):
    table = {"script": "h100", "gpu": "h100"} | more
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    path.write_text(
        (CLUSTERS / "h100_pod.toml").read_text().split("[slurm]")[0]
        + "\n".join(["[slurm]", *lines])
        + "\n"
    )
    return path


def test_a_site_has_a_script_of_its_own(capsys, tmp_path, monkeypatch):
    plain = (site.HERE / "h100.sbatch").read_text()
    monkeypatch.setattr(site, "HERE", tmp_path)
    module = "module load cuda\nexport HF_HOME=/scratch/hf\n"
    script = plain.replace("# Slurm runs a copy", f"{module}# Slurm runs a copy").replace(
        "\n\n# GPUs that", "\n# GPUs that"
    )
    (tmp_path / "own.sbatch").write_text(script)
    file = write_cluster(tmp_path / "mine.toml", script="own")
    text = printed(capsys, "--nodes", "2", *RUN, cluster=file.with_suffix(""))
    assert module in text
    assert text.index(module) < text.index("\ntrain runs/here ")
    (tmp_path / "own.sbatch").write_text(plain + "echo done\n")
    ending = end(submit.main, ["--cluster", str(file), "--nodes", "2", "--dry-run", *RUN])
    assert (ending.status, ending.wrong) == (1, None)
    assert f"{tmp_path / 'own.sbatch'} " in ending.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--nodes 1 RUN --dry-run", "dry_run is among the run's flags"),
        ("--nodes 1 --array '--seed 2' '--lr 1 --save=q' -- RUN", "save is in '--lr 1 --save=q'"),
        ("--gpus 12 RUN", "gpus is 12, but .* has 8 per node"),
        ("--nodes 1 train.py", "the entry is train.py"),
        ("--nodes 1 RUN --context-parallel-size 3", "context_parallel_size is 3"),
        ("--nodes 1 RUN --save none", "save is not set"),
        ("--nodes 1 --time 10 RUN", "time is 10, but .* save 600 s before"),
        ("--nodes 1 --time soon RUN", "time is soon"),
        ("--nodes 1 --option quick RUN", "option is 'quick'"),
        ("--nodes 1 --container-runtime apptainer RUN", "container_runtime is apptainer"),
    ],
)
def test_what_cannot_run_is_refused_before_it_waits_in_a_queue(arguments, words):
    ending = end(submit.main, ["--cluster", "h100", *asked_for(arguments)])
    assert (ending.status, ending.wrong) == (1, None)
    assert re.search(words, ending.stderr), ending.stderr


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("", ".slurm. has no script"),
        ('[slurm]\nscript = "v100"\n', "script of .slurm. is 'v100'"),
        ('[slurm]\nscript = "a100"\nqueue = "x"\n', "unknown key 'queue' of .slurm."),
        ('[slurm]\nscript = "a100"\ncpus_per_gpu = "x"\n', "cpus_per_gpu of .slurm. is 'x'"),
    ],
)
def test_a_clusters_file_that_says_nothing_of_its_slurm(table, words, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text((CLUSTERS / "a100_pod.toml").read_text().split("[slurm]")[0] + table)
    ending = end(submit.main, ["--cluster", str(file), "--nodes", "1", *RUN])
    assert ending.status == 1
    assert re.search(words, ending.stderr), ending.stderr


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (
            (
                "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job "
                "submission failed"
            ),
            "sinfo -s",
        ),
        (
            (
                "sbatch: error: Batch job submission failed: Requested node configuration is not "
                "available"
            ),
            "sinfo -N",
        ),
        (
            "sbatch: error: CPU count per node can not be satisfied",
            "set cpus_per_gpu in the cluster's file",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid feature specification",
            "change constraint in the",
        ),
        (
            "sbatch: error: Batch job submission failed: Something new",
            "look at the script with --dry-run",
        ),
    ],
)
def test_slurms_words_and_our_hint(message, hint, tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text(
        f"#!/bin/sh\ncat > /dev/null\nprintf '{message}\\n' >&2\nexit 1\n"
    )
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="sbatch refused the job: ") as caught:
        submit.submit("#!/bin/bash\n")
    assert hint in str(caught.value)
    assert message.split(": ")[-1].split("\n")[0] in str(caught.value)


def test_without_slurm_the_way_out_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no sbatch here; start on a login node, or print"):
        submit.submit("")


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("5", 300),
        ("5:30", 330),
        ("1:00:00", 3600),
        ("1-2", 93600),
        ("1-2:30", 95400),
        ("2-0:0:1", 172801),
    ],
)
def test_a_limit_is_read_as_sbatch_reads_it(limit, seconds):
    assert script.seconds_of(limit) == seconds
    assert script.seconds_of("UNLIMITED") == float("inf")
