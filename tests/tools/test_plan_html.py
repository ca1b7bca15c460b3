"""tools.plan --html: the page has the numbers of the text output, in every way to plan."""

import json
import shlex
from dataclasses import asdict

import pytest

from planner.cluster import load_cluster
from runtime.progress import amount, duration
from tests.planner.page.pages import Page, check_alone
from tests.planner.page.test_measured import TIMES, write_profile
from tests.tools.plans import A100, MODEL, rows_of, without_launcher  # noqa: F401
from tools.fit import parsed
from tools.plan import main
from train.config.flags import ConfigError, write_toml

FEW = (*MODEL, *A100, "--context-parallel-size", "4", "--top", "3")


def page_of(file, *argv):
    assert main([*argv, "--html", str(file)]) == 0
    page = Page(file.read_text())
    check_alone(page)
    return page


def check_numbers(page, rows):
    """Assert that the page's tables have the numbers of the JSON's rows."""
    plans = page.tables["plans"]
    columns = {head: [row[number] for row in plans[1:]] for number, head in enumerate(plans[0])}
    assert columns["predicted"] == [duration(row["predicted_seconds"]) for row in rows]
    assert columns["memory GB"] == [f"{row['memory_bytes'] / 1e9:.1f}" for row in rows]
    speeds = [f"{row['predicted_tokens_per_second']:,.0f}" for row in rows]
    assert columns["tokens/s"] == speeds

    head, *lines = page.tables["memory"]
    for line, row in zip(lines, rows, strict=True):
        cells = dict(zip(head, line, strict=True))
        assert cells["together"] == amount(row["memory_bytes"])
        for cause, count in row["memory_bytes_by_part"].items():
            assert cells.get(cause, "") == (amount(count) if count else "")

    for number, row in enumerate(rows, 1):
        cells = {line[0]: line[1] for line in page.tables[f"step-{number}"][1:]}
        assert cells.pop("a step") == duration(row["predicted_seconds"])
        for cause, seconds in row["predicted_seconds_by_part"].items():
            if seconds:
                assert cells[cause] == duration(seconds)
        ends = {line[-1] for line in page.tables[f"ranks-{number}"][1:]}
        assert ends == {duration(row["predicted_seconds"])}


def test_the_page_has_the_numbers_of_the_output(tmp_path, capsys):
    file = tmp_path / "new" / "plan.html"
    page = page_of(file, *FEW, "--json")
    out = capsys.readouterr().out
    entry = json.loads(out)
    check_numbers(page, entry["rows"])
    assert main([*FEW]) == 0
    text = capsys.readouterr().out
    # The method may contain a comma, as on the page.
    assert [row[1] for row in rows_of(text)] == [row[1] for row in page.tables["plans"][1:]]
    assert "4 processes on WallFacer's A100, 8 x 4, sequences of 4096 tokens" in page.text

    rates = {row[0]: row[1:] for row in page.tables["constants"][1:]}
    assert rates["peak_tflops"][0] == f"{entry['cluster']['peak_tflops']:g}"
    assert rates["matmul_fraction"][0] == f"{entry['cluster']['matmul_fraction']:g}"
    assert {row[0] for row in page.tables["formulas"][1:]} >= {"attention", "linear"}

    doubled = page.tables["doubled"]
    lines = {row[0]: row[1:] for row in doubled[1:]}
    assert lines["processes"] == ["4", "4", "8"]
    assert lines["tokens of a sequence"] == ["4,096", "8,192", "4,096"]
    main([*FEW, "--seq-length", "8192", "--json"])
    longer = json.loads(capsys.readouterr().out)["rows"][0]
    assert lines["a step"][1] == duration(longer["predicted_seconds"])
    main([*FEW, "--world-size", "8", "--json"])
    wider = json.loads(capsys.readouterr().out)["rows"][0]
    assert lines["a step"][2] == duration(wider["predicted_seconds"])
    assert lines["memory"][2] == amount(wider["memory_bytes"])


def test_a_wrong_number_on_the_page_is_noticed(tmp_path, capsys):
    file = tmp_path / "plan.html"
    page = page_of(file, *FEW, "--json")
    rows = json.loads(capsys.readouterr().out)["rows"]
    check_numbers(page, rows)
    for key in ("predicted_seconds", "memory_bytes", "predicted_tokens_per_second"):
        wrong = [rows[0] | {key: rows[0][key] * 1.1}, *rows[1:]]
        with pytest.raises(AssertionError):
            check_numbers(page, wrong)


def test_the_commands_of_the_page_can_be_copied(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = page_of(tmp_path / "plan.html", *FEW)
    write, start, again = page.commands
    assert shlex.split(write)[:3] == ["python", "-m", "tools.plan"]
    assert main(shlex.split(write)[3:]) == 0
    words = start.replace("\\\n", " ").split()
    assert words[:4] == ["torchrun", "--nproc-per-node", "4", "pretrain_gpt.py"]
    config = parsed([word for word in words[4:] if word not in ("--save", "runs/NAME")])
    plans = [row[1] for row in page.tables["plans"][1:]]
    assert plans[0].startswith(config.context.context_parallel_method)
    assert main(shlex.split(again)[3:]) == 0
    capsys.readouterr()


def test_a_named_model_has_its_command_and_four_plans(tmp_path, capsys):
    page = page_of(tmp_path / "plan.html", "llama3_8b", "--seq-length", "8192", "--world-size", "2")
    out = capsys.readouterr().out
    assert len(page.tables["plans"]) == 1 + 4
    command = page.commands[0].split()
    assert " ".join(command) in " ".join(out.split())
    assert command[:2] == ["torchrun", "--nproc-per-node"]
    assert f"{page.tables['plans'][1][4]} a step" in out
    assert "Error: at most" in page.text


def test_a_pipeline_shows_its_stages_and_their_waits(tmp_path, capsys):
    argv = ["--config", "llama2_7b", "--bf16", "--cluster", "h100", "--seq-length", "131072"]
    argv += ["--context-parallel-size", "8", "--pipeline-model-parallel-size", "4"]
    page = page_of(tmp_path / "plan.html", *argv, "--global-batch-size", "8", "--top", "1")
    capsys.readouterr()
    head, *rows = page.tables["ranks-1"]
    assert [row[0] for row in rows] == [
        f"stage {stage}, 8 ranks: {8 * stage} to {8 * stage + 7}" for stage in range(4)
    ]
    waits = {row[head.index("wait for other stages")] for row in rows}
    assert len(waits) == 1
    assert f"Each stage waits {waits.pop()} while the pipeline fills and drains." in page.text
    for direction in ("F", "B"):
        for number in range(8):
            assert page.texts.count(f"{direction}{number}") >= 4, "once on each stage"


def test_if_nothing_fits_the_reason_is_on_the_page(tmp_path, capsys):
    argv = (*MODEL[:-2], *A100, "--longest", "--world-size", "2", "--json")
    page = page_of(tmp_path / "plan.html", *argv)
    check_numbers(page, json.loads(capsys.readouterr().out)["rows"])
    plans = {row[0]: row[1:] for row in page.tables["doubled"][1:]}["plan"]
    assert plans[1].startswith("nothing fits: memory_gb of WallFacer's A100, 8 x 4 is 40, but ")
    assert not any(plan.startswith("nothing fits") for plan in (plans[0], plans[2]))


def test_a_refusal_of_twice_the_gpus_is_not_a_lack_of_memory(tmp_path, capsys):
    flags = ["--global-batch-size", "2", "--world-size", "4", "--context-parallel-size", "2"]
    page = page_of(tmp_path / "plan.html", *MODEL, *A100, *flags)
    capsys.readouterr()
    now, longer, wider = {row[0]: row[1:] for row in page.tables["doubled"][1:]}["plan"]
    assert wider.startswith("refused: global_batch_size is 2, ")
    assert not now.startswith("refused")
    assert not longer.startswith("refused")


@pytest.mark.parametrize(
    "flags",
    [
        ("--all", "--world-size", "2"),
        ("--fewest",),
        ("--reset-attention-mask", "--document-lengths", "300", "2000"),
    ],
)
def test_every_way_to_plan_has_a_page(tmp_path, capsys, flags):
    page = page_of(tmp_path / "plan.html", *MODEL[:-2], *A100, *flags, "--json")
    check_numbers(page, json.loads(capsys.readouterr().out)["rows"])


def test_a_diffusion_transformer_has_twice_the_frames_or_height(tmp_path, capsys):
    argv = ["--config", "dit_s_2", "--cluster", "h100", "--world-size", "2", "--top", "1"]
    page = page_of(tmp_path / "plan.html", *argv, "--json")
    check_numbers(page, json.loads(capsys.readouterr().out)["rows"])
    lines = {row[0]: row[1:] for row in page.tables["doubled"][1:]}
    now, longer, wider = (int(text.replace(",", "")) for text in lines["tokens of a sequence"])
    assert (longer, wider) == (2 * now, now)


def test_a_run_s_profile_is_shown_beside_its_prediction(tmp_path, capsys):
    run = write_profile(tmp_path / "run & more", [asdict(times) for times in TIMES])
    flags = [*MODEL, "--context-parallel-size", "2", "--context-parallel-method", "ring"]
    (run / "config.toml").write_text(write_toml(parsed([*flags, "--mock-data"])))
    page = page_of(tmp_path / "plan.html", *FEW, "--measured", str(run))
    capsys.readouterr()
    head, *rows = page.tables["measured"]
    assert [row[:2] for row in rows] == [
        ["0", "predicted"],
        ["0", "measured"],
        ["1", "predicted"],
        ["1", "measured"],
    ]
    assert rows[1][head.index("compute")] == duration(1.2)
    assert rows[3][-1] == duration(2.5)
    assert f"{run} took {duration(2.5)}" in page.text


@pytest.mark.parametrize(
    ("ranks", "context", "message"),
    [
        (2, 4, "context_parallel_size is 4, which"),
        (3, 2, "context_parallel_size is 2, which"),
        (2, 1, None),
    ],
)
def test_a_profile_of_other_ranks_than_the_run_s_mesh_is_refused_before_the_search(
    tmp_path, capsys, ranks, context, message
):
    rows = [asdict(TIMES[0]) | {"rank": rank} for rank in range(ranks)]
    run = write_profile(tmp_path / "run", rows)
    flags = [*MODEL, "--context-parallel-size", str(context), "--mock-data"]
    if context > 1:
        flags += ["--context-parallel-method", "ring"]
    (run / "config.toml").write_text(write_toml(parsed(flags)))
    file = tmp_path / "plan.html"
    status = main([*FEW, "--html", str(file), "--measured", str(run)])
    out, error = capsys.readouterr()
    assert file.exists() == (message is None) == (status == 0)
    if message:
        assert out == ""
        assert f"{run}: the profile has {ranks} ranks, which does not suit" in error
        assert message in error


def test_an_error_in_the_page_leaves_the_output_and_the_written_plan(tmp_path, capsys, monkeypatch):
    def fail(plans):
        raise ConfigError("no page")

    monkeypatch.setattr("tools.plan.plan_page", fail)
    written = tmp_path / "plan.toml"
    flags = ["--write", str(written), "--html", str(tmp_path / "plan.html")]
    assert main([*FEW, *flags]) != 0
    assert len(rows_of(capsys.readouterr().out)) == 3
    assert written.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*FEW[:-2], "--fits", "--html", "x.html"), "--html is for ranked plans, but --fits"),
        ((*FEW, "--html", "."), "--html is ., but that is a folder; give a file"),
        ((*FEW, "--measured", "x"), "give --html FILE, or leave out --measured"),
        ((*FEW, "--html", "x.html", "--measured", "x"), "x/config.toml"),
        ((*FEW, "--html", "x", "--write", "new/../x"), "--write is new/../x and --html x, which"),
        ((*FEW, "--html", "/dev/null/x"), "--html is /dev/null/x, in /dev/null, and /dev/null is"),
        ((*FEW, "--html", "/proc/none/x"), "/proc/none, which cannot be written to"),
        (
            (*FEW, "--write", "/dev/null/x"),
            "--write is /dev/null/x, in /dev/null, and /dev/null is",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_the_search(
    tmp_path, capsys, monkeypatch, argv, message
):
    monkeypatch.chdir(tmp_path)
    assert main(list(argv)) != 0
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_packed_documents_has_the_rate_of_its_kernel(tmp_path, capsys):
    flags = ["--cluster", "h100", "--context-parallel-size", "2", "--top", "1"]
    packed = ["--reset-attention-mask", "--document-lengths", "300", "2000"]
    page = page_of(tmp_path / "plan.html", *MODEL, *flags, *packed)
    capsys.readouterr()
    rows = {row[0]: row[1:] for row in page.tables["constants"][1:]}
    assert rows["attention_kernel"][0] == "flash_attn"
    assert f"at {float(rows['attention_fraction'][0]):.0%}; the cluster" in page.text


def test_numbers_of_a_cluster_s_file_have_its_comments():
    from planner.page.origins import comments_of, kind_of
    from planner.page.report import file_of

    comments = comments_of(file_of(load_cluster("h100"), "h100"))
    assert comments["matmul_fraction"].startswith("github.com/stas00/ml-engineering, measured")
    assert kind_of(comments["matmul_fraction"]) == "measured, published"
    assert kind_of(comments["peak_tflops"]) == "data sheet"
    assert kind_of(comments["inside_gb_per_s"]) == "data sheet, assumed"
    assert kind_of(comments["exposed_share"]) == "fitted to published runs"
    assert comments["attention_kernel"].startswith("what auto takes")
    assert "gpus_per_node" not in comments
    assert kind_of("") == "stated"
