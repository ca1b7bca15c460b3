"""The job's shell functions, with functions in the place of Slurm's commands."""

import os
import re

import pytest

from slurm.environment import digest_of_sources
from tests.starts import ended

STAND_IN = """
set -uo pipefail
sleep() { [ "$1" != 5 ] || command sleep 5; }
getent() { [ -z "$SIGNALLED" ] || kill -USR1 $$; [ -z "$UNKNOWN" ]; }
scontrol() {
    case "$1 $2" in
    "show hostnames") echo node1 ;;
    "requeue 7")
        echo try >>"$RUN/tries"
        [ -z "$REFUSAL" ] || { echo "$REFUSAL" >&2 && return 1; }
        echo "scontrol $*" ;;
    "show job")
        [ -n "$AWAY" ] ||
            echo "JobId=7 JobState=RUNNING $KNOWN ExcNodeList=$EXCLUDED Features=(null)" ;;
    *) echo "scontrol $*" ;;
    esac
}
sbatch() {
    echo "sbatch $*" >"$RUN/asked"
    [ -z "$FEW" ] || { echo "sbatch: error: too few" && false; }
}
srun() {
    echo "srun $*"
    [ -z "$SAID" ] || { mkdir -p "$LONGMESH_ENDINGS" && echo "$SAID" >"$LONGMESH_ENDINGS/rank-1"; }
    [ -z "$NEW" ] || mkdir "$RUN/iter_$(printf %07d "$NEW")"
    [ -z "$FROM" ] || echo '{"time": 1.0, "iteration": '"$FROM}" >>"$RUN/starts.jsonl"
    [ -z "$HUNG_ON" ] || echo "$HUNG_ON" >"$RUN/hung_nodes.txt"
    return $STATUS
}
export SLURM_NNODES=1 SLURM_JOB_PARTITION=gpu
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=node1 GPUS_PER_NODE= SLURM_NTASKS_PER_NODE=8
[ -n "$CONTAINER" ] || export PYTHON=python
source slurm/job.sh
"""


def started(run, *flags, status=0, hung="", excluded="(null)", **more):
    """The exit status and the words of one start of a job.

    Args:
        more: what the ranks' start says, the iterations of its new checkpoint and that it went on
            from; what Slurm knows; whether it is away, has too few nodes, or signals the job at its
            start; variables of the job.
    """
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text("train_iters = 9\n")
    names = (
        "said",
        "new",
        "from",
        "known",
        "few",
        "signalled",
        "away",
        "container",
        "launcher",
        "refusal",
        "unknown",
    )
    settings = {name.upper(): more.pop(name, more.pop(name + "_", "")) for name in names}
    settings |= {name.upper(): value for name, value in more.items()}
    settings |= {"RUN": str(run), "STATUS": str(status), "HUNG_ON": hung, "EXCLUDED": excluded}
    script = STAND_IN + 'train "$RUN" pretrain_gpt.py "$@"'
    done = ended(
        ["bash", "-c", script, "job", *flags], inherited={"PATH": os.environ["PATH"]}, **settings
    )
    return done.returncode, done.stdout + done.stderr


def test_the_first_start_begins_where_the_flags_say_and_later_ones_in_their_own_folder(tmp_path):
    run = tmp_path / "run"
    flags = ("--finetune", "--load", "base", "--ckpt-step=3", "--lr", "1e-4")
    _, first = started(run, *flags, new="4")
    assert f"pretrain_gpt.py --lr 1e-4 --finetune --load base --ckpt-step=3 --save {run}\n" in first
    _, second = started(run, *flags, new="8")
    assert (
        f"pretrain_gpt.py --lr 1e-4 --load {run} --no-finetune --ckpt-step none --save {run}\n"
        in second
    )
    _, plain = started(tmp_path / "other", "--lr", "1e-4", new="4")
    assert f"--load {tmp_path / 'other'} --save {tmp_path / 'other'}\n" in plain
    (tmp_path / "asked.toml").write_text('[checkpoint]\nload = "base"\nfinetune = true\n')
    for flags in (
        ("--config", str(tmp_path / "asked.toml")),
        (f"--config={tmp_path / 'asked.toml'}",),
    ):
        _, output = started(tmp_path / "asked", *flags, status=137)
        assert f"pretrain_gpt.py {' '.join(flags)} --save {tmp_path / 'asked'}\n" in output, (
            "the file says where"
        )


LOST = "75 rank 0 ends because another rank did (Connection reset by peer)"
BAD = "1 error: loss is not finite"


@pytest.mark.parametrize(
    ("start", "code", "again"),
    [
        ({}, 0, True),
        ({"status": 1}, 1, False),
        ({"new": "9"}, 0, False),
        ({"signalled": "yes"}, 138, True),
        ({"away": "yes"}, 0, True),
        *(
            ({"status": status, "said": output}, status, True)
            for status in (137, 143)
            for output in ("", LOST)
        ),
        *(({"status": status, "said": BAD}, 1, False) for status in (137, 143)),
        ({"status": 1, "said": LOST}, 75, True),
        ({"status": 1, "said": f"{LOST}\n1 ValueError: what all of them did not answer"}, 1, False),
    ],
)
def test_how_a_start_ends_decides_if_the_job_is_queued_again(start, code, again, tmp_path):
    """An error ends the run.

    Ranks that are killed, lose a peer or are told to end do not, nor does a signal early.
    """
    run = tmp_path / "run"
    status, output = started(run, **{"new": "4", **start})
    assert status == code
    assert ("queued again" in output) == again
    assert ("scontrol requeue 7" in output) == again
    assert ("srun" in output) == ("signalled" not in start)
    assert ("\nfinished: " in output) == (start == {"new": "9"})
    assert again or all(
        f"1 {error}\n" in output for error in re.findall("^1 (.*)", start.get("said", ""), re.M)
    )
    if start == {"new": "9"}:
        assert "queued again" in started(run, status=138)[1], (
            "the next stage of it, ended in its start-up"
        )
    if start == {"status": 1, "said": LOST}:
        assert "queued again" not in started(run, status=1)[1], (
            "what the last start left counts no more"
        )


@pytest.mark.parametrize(
    ("more", "line", "starts"),
    [
        (
            {"unknown": "yes"},
            "does not resolve the node name node1; enter it in DNS or /etc/hosts",
            False,
        ),
        ({"most_requeues": "0"}, "error: queued again 0 times, and not finished", True),
    ],
)
def test_what_cannot_go_on_ends_with_its_reason(more, line, starts, tmp_path):
    code, output = started(tmp_path / "run", new="4", **more)
    assert (code, "scontrol requeue 7" in output, "srun" in output) == (1, False, starts)
    assert line in output


def test_a_container_has_a_python_of_its_own(tmp_path):
    _, output = started(tmp_path / "run", new="9", container="image.sqsh")
    assert re.search(r"--container-image=image.sqsh .* python3 pretrain_gpt.py", output), output


def sruns(output):
    """The options of srun and the flags of the run in a start's words."""
    (line,) = [line for line in output.splitlines() if line.startswith("srun ")]
    options, _, flags = line.partition(" pretrain_gpt.py ")
    return options, f" {flags} "


GPUS = {"slurm_gpus_on_node": "8"}


def test_a_job_with_gpus_asks_for_cuda_by_name_unless_the_run_names_a_device(tmp_path):
    (tmp_path / "cpu.toml").write_text('[mesh]\ndevice = "cpu"\n')
    (tmp_path / "auto.toml").write_text('[mesh]\ndevice = "auto"\n')
    for number, (flags, asks) in enumerate(
        [
            (("--config", str(tmp_path / "auto.toml")), True),
            (("--device=cpu",), False),
            (("--config", str(tmp_path / "cpu.toml")), False),
            ((f"--config={tmp_path / 'cpu.toml'}", "--device", "auto"), True),
        ]
    ):
        _, output = started(tmp_path / str(number), *flags, new="9", **GPUS)
        assert (" --device cuda " in sruns(output)[1]) == asks, (flags, output)
    _, output = started(tmp_path / "without", new="9")
    assert "--device" not in sruns(output)[1], "a job that asked for no GPU"


def test_ranks_are_bound_and_get_the_jobs_variables_whatever_the_site_exports(tmp_path):
    options, _ = sruns(started(tmp_path / "run", new="9", slurm_export_env="NONE")[1])
    for option in ("--export=ALL", "--distribution=block:block", "--cpu-bind=cores"):
        assert f" {option} " in options


@pytest.mark.parametrize(
    ("cpus", "requested", "each"),
    [("224(x4)", "12", 28), ("224,128(x2)", "12", 16), ("8", "1", 1), ("", "12", 12)],
)
def test_ranks_share_out_all_cpus_of_a_node_so_that_half_of_them_fill_a_socket(
    cpus, requested, each, tmp_path
):
    node = {"slurm_job_cpus_per_node": cpus, "slurm_cpus_per_task": requested}
    assert f" --cpus-per-task={each} " in sruns(started(tmp_path / "ranks", new="9", **node)[1])[0]
    options, _ = sruns(started(tmp_path / "agents", new="9", launcher="torchrun", **node)[1])
    assert f" --cpus-per-task={8 * each} " in options, "an agent has the CPUs of its eight ranks"


def test_torchrun_binds_the_ranks_of_gpus_and_writes_a_log_per_rank(tmp_path):
    on_gpus, _ = sruns(
        output := started(tmp_path / "gpus", new="9", launcher="torchrun", **GPUS)[1]
    )
    assert on_gpus.endswith(" --numa-binding=node")
    assert f"--log-dir {tmp_path / 'gpus' / 'logs' / '7'} --tee 3" in output
    on_cpus, _ = sruns(
        started(tmp_path / "cpus", "--device", "cpu", new="9", launcher="torchrun", **GPUS)[1]
    )
    assert "--numa-binding" not in on_cpus


@pytest.mark.parametrize(
    ("refusal", "tries"),
    [
        ("Job violates accounting/QOS policy", 3),
        ("Unable to contact slurm controller (connect failure)", 18),
    ],
)
def test_a_refused_requeue_is_tried_three_times_and_a_silent_controller_for_minutes(
    refusal, tries, tmp_path
):
    code, output = started(tmp_path / "run", new="4", refusal=refusal)
    assert code == 1
    assert (tmp_path / "run" / "tries").read_text().split() == ["try"] * tries
    assert refusal in output
    assert "error: not finished, but scontrol requeue 7 is refused" in output


def test_a_start_says_which_sources_changed_since_the_first_one(tmp_path):
    run = tmp_path / "run"
    (config := tmp_path / "run.toml").write_text("[train]\n")
    flags = ("--config", str(config))
    assert "WARNING" not in started(run, *flags, new="1")[1]
    assert "WARNING" not in started(run, *flags, new="2")[1]
    config.write_text("[train]\nseed = 2\n")
    output = started(run, *flags, new="3")[1]
    assert re.search(
        rf"^WARNING: the sources are not those .* changed {config}; to keep them", output, re.M
    ), output
    listed = (run / "logs" / "7" / "sources").read_text()
    assert " ./model/decoder.py\n" in listed
    assert " ./slurm/job.sh\n" in listed
    assert " ./tests/" not in listed
    (run / "logs" / "7" / "sources").write_text(
        re.sub(r"\w+( +\./model/decoder\.py)", r"0\1", listed)
    )
    assert "changed ./model/decoder.py " in started(run, *flags, new="4")[1]


def test_a_start_says_that_the_sources_changed_in_the_queue(tmp_path):
    digest = digest_of_sources(None)
    assert (
        digest_of_sources("llama3_8b")
        == digest_of_sources("configs/models/llama3_8b.toml")
        != digest
    )
    assert "WARNING" not in started(tmp_path / "run", new="1", longmesh_sources=digest)[1]
    output = started(tmp_path / "other", new="1", longmesh_sources="0badc0de")[1]
    assert (
        f"WARNING: the sources are not those that the job was submitted with: digest 0badc0de "
        f"then, {digest} "
    ) in output


def test_a_job_that_makes_no_progress_ends(tmp_path):
    run = tmp_path / "run"
    assert started(run, new="4")[0] == 0
    for _ in range(2):
        assert "queued again" in started(run, status=138)[1]
    code, output = started(run, status=138)
    assert code == 1
    assert "error: 3 starts in a row without a new checkpoint" in output
    assert "queued again" in started(run, status=138, new="5")[1], "progress counts anew"


def test_a_start_from_a_later_local_checkpoint_is_progress(tmp_path):
    for number, later in enumerate(("2", "4", "4", "4")):
        code, output = started(tmp_path / "run", status=138, from_=later)
        assert "queued again" in output, number
    code, output = started(tmp_path / "run", status=138, from_="4")
    assert (code, "error: 3 starts in a row" in output) == (1, True)


@pytest.mark.parametrize(
    ("status", "excluded", "kept_off"),
    [(75, "(null)", "node3"), (137, "node[5-6]", "node[5-6],node3")],
)
def test_a_job_whose_rank_hung_is_queued_again_without_its_node(
    status, excluded, kept_off, tmp_path
):
    ended, output = started(
        tmp_path / "run", status=status, new="4", hung="node3", excluded=excluded
    )
    assert ended == 75
    assert "not finished: queued again" in output
    assert f"scontrol update JobId=7 ExcNodeList={kept_off}\n" in output
    assert not (tmp_path / "run" / "logs" / "7" / "stuck").read_text().strip("0\n")
    _, output = started(tmp_path / "run", new="6")
    assert "ExcNodeList" not in output
    known_nodes = (
        "Account=us QOS=night Reservation=(null) NumNodes=2-4 TimeLimit=1-00:00:00 "
        "TresPerNode=gres:gpu:8"
    )
    _, output = started(
        tmp_path / "run", status=status, new="7", hung="node3", few="yes", known=known_nodes
    )
    assert "queued again" in output
    assert (
        "a rank hung on node3, which the job keeps: Slurm would not start it without node3"
        in output
    )
    assert "ExcNodeList" not in output
    requested = (tmp_path / "run" / "asked").read_text()
    assert (
        "--nodes=2-4 --partition=gpu --account=us --qos=night --time=1-00:00:00 --gres=gpu:8 "
        "--exclu"
    ) in requested
