"""A run's profile beside its prediction, and pages of dry runs."""

import json
import math
from dataclasses import asdict

import pytest

import pretrain_gpt
from planner.cluster import load_cluster
from planner.page.measured import ProfiledRun, comparisons, measured_section, read_profile
from planner.page.report import file_of, shown_path
from planner.page.spans import step_timeline
from planner.search import weigh
from runtime.errors import UserError
from runtime.progress import amount, duration
from tests.planner.page.pages import Page, check_alone
from tests.tools.plans import without_launcher  # noqa: F401
from tools.fit import parsed
from train.callbacks.profile import RankTimes
from train.config.flags import ConfigError

TINY = ["--config", "llama_tiny", "--vocab-size", "512", "--context-parallel-size", "2"]
TIMES = [
    RankTimes(0, "vm", 100, 2.0, 1.2, 0.5, 0.3, 0.1, 0.15),
    RankTimes(1, "vm", 100, 2.5, 1.0, 0.9, 0.8, 0.0, 0.0),
]


def write_profile(run, rows):
    (run / "profile").mkdir(parents=True)
    (run / "profile" / "ranks.json").write_text(json.dumps(rows))
    return run


def test_predicted_and_measured_seconds_of_a_rank_each_add_up_to_its_step(tmp_path):
    run = write_profile(tmp_path / "run", [asdict(times) for times in TIMES])
    times = read_profile(run)
    assert times == TIMES
    config = parsed([*TINY, "--context-parallel-method", "zigzag"])
    cluster = load_cluster("cpu")
    timeline = step_timeline(weigh(config, 2, cluster, None), cluster)
    for rank_times, comparison in zip(times, comparisons(times, timeline), strict=True):
        assert sum(comparison.measured.values()) == pytest.approx(rank_times.iteration)
        assert sum(comparison.predicted.values()) == pytest.approx(timeline.prediction.time)
        seconds = timeline.prediction.seconds
        assert comparison.predicted["compute"] < seconds["linear"] + seconds["attention"]

    sections = measured_section(ProfiledRun(run, config, times), timeline, cluster.name)
    texts = "".join("".join(section.itertext()) for section in sections)
    assert f"took {duration(2.5)} an iteration on its slowest rank" in texts
    for count in (1.2, 1.0, 0.3, 0.8, 0.1, 0.15, 0.25, timeline.prediction.time):
        assert duration(count) in texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "not valid JSON"),
        ("[]", "has ranks"),
        ("7", "rank is missing or wrong"),
        ('[{"rank": 0}]', "host of a rank is missing or wrong"),
        (json.dumps([asdict(TIMES[1])]), r"has ranks \[1\]"),
        (json.dumps([asdict(TIMES[0]) | {"compute": "1"}]), "compute of a rank is missing"),
        (json.dumps([asdict(TIMES[0]) | {"rank": False}]), "rank of a rank is missing or wrong"),
        (json.dumps([asdict(TIMES[0]) | {"compute": True}]), "compute of a rank is missing"),
        (json.dumps([asdict(TIMES[0]) | {"iteration": 0}]), "iteration of a rank is 0"),
        (json.dumps([asdict(TIMES[0]) | {"data": math.nan}]), "data of a rank is nan"),
        (json.dumps([asdict(TIMES[0]) | {"iteration": math.inf}]), "iteration of a rank is inf"),
        (json.dumps([asdict(TIMES[0]) | {"iteration": 10**400}]), "iteration of a rank is 1000"),
        (json.dumps([asdict(TIMES[0]) | {"exposed": -1}]), "exposed of a rank is -1"),
    ],
)
def test_a_broken_profile_is_refused_with_the_flag_that_writes_one(tmp_path, text, message):
    run = write_profile(tmp_path / "run", [])
    file = run / "profile" / "ranks.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=f"{message}.*--profile --save FOLDER"):
        read_profile(run)


def test_a_cluster_is_found_again_by_its_numbers_or_by_its_name(tmp_path):
    h100 = load_cluster("h100")
    assert shown_path(file_of(h100, None)) == "configs/clusters/h100_pod.toml"
    assert shown_path(file_of(h100, "h100")) == "configs/clusters/h100_pod.toml"
    copied = tmp_path / "own.toml"
    copied.write_text(file_of(h100, "h100").read_text().replace("= 989 ", "= 988 "))
    assert file_of(load_cluster(copied), None) is None
    assert shown_path(file_of(load_cluster(copied), str(copied))) == str(copied)


def test_a_dry_run_writes_its_table_and_its_step_as_a_page(tmp_path, capsys):
    file = tmp_path / "new" / "dry <run>.html"
    flags = [*TINY, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4"]
    flags += ["--context-parallel-method", "zigzag", "--cluster", "cpu"]
    pretrain_gpt.main([*flags, "--dry-run", "--dry-run-html", str(file)])
    out = capsys.readouterr().out
    page = Page(file.read_text())
    check_alone(page)
    assert out.endswith(f"written: {file}\n")
    starts = [line for line in out.splitlines() if line.startswith(("start: ", "or: "))]
    assert page.commands == [start.partition(": ")[2] for start in starts]
    assert "--dry-run" not in " ".join(page.commands)

    # The bytes of the output's table, in the units of the page.
    heads, _, *rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in out.splitlines()
        if line.startswith("|")
    ]
    memory = page.tables["memory"]
    assert [row[0] for row in memory[1:]] == ["stage 0, rank 0", "stage 1, rank 2"]
    for row, cells in zip(rows, memory[1:], strict=True):
        total = float(row[heads.index("GB of memory")])
        written = float(cells[memory[0].index("together")].removesuffix(" MB"))
        assert written == pytest.approx(1000 * total, abs=0.6)
    step = page.tables["step-1"][-1][1]
    assert f"time: {step} a step, predicted" in out
    assert {row[-1] for row in page.tables["ranks-1"][1:]} == {step}
    assert "rehearsed" in page.text


def test_a_dry_run_that_does_not_fit_still_writes_its_page(tmp_path):
    small = tmp_path / "small.toml"
    text = file_of(load_cluster("cpu"), "cpu").read_text()
    lines = [
        "memory_gb = 0.01" if line.startswith("memory_gb ") else line for line in text.split("\n")
    ]
    small.write_text("\n".join(lines))
    file = tmp_path / "page.html"
    flags = [*TINY, "--context-parallel-method", "zigzag", "--cluster", str(small)]
    with pytest.raises(UserError, match="does not fit"):
        pretrain_gpt.main([*flags, "--dry-run", "--dry-run-html", str(file)])
    page = Page(file.read_text())
    assert "Does not fit in 0.01 GB" in page.text
    assert amount(1e7) not in page.tables["memory"][1]
    assert str(small) in page.text


def test_a_page_of_a_dry_run_in_a_folder_that_cannot_be_is_refused_at_first(capsys):
    for file, message in {
        "/dev/null/x.html": "/dev/null, and /dev/null is a file",
        "/proc/none/x.html": "/proc/none, which cannot be written to",
    }.items():
        with pytest.raises(ConfigError, match=f"dry_run_html is {file}, in {message}"):
            pretrain_gpt.main([*TINY, "--dry-run", "--dry-run-html", file])
    assert "dry run of" not in capsys.readouterr().out


def test_a_page_of_a_dry_run_needs_a_dry_run_and_a_file(tmp_path):
    with pytest.raises(ConfigError, match="add --dry-run, or leave out --dry-run-html"):
        parsed([*TINY, "--dry-run-html", "x.html"])
    with pytest.raises(ConfigError, match="that is a folder; give a file"):
        parsed([*TINY, "--dry-run", "--dry-run-html", str(tmp_path)])
