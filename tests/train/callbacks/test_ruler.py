"""The curve of RULER in a run.

Wrong tokens by example, on any mesh what greedy writing begins with, and settings.
"""

import pytest
import torch

from data.loader import IGNORE_INDEX
from runtime.ranks import run_ranks
from tests.pretraining import flags_of
from tools.common.training import Records, trainer_of
from tools.ruler.examples import RulerConfig
from train.config.language import parse_args
from train.objectives.language import count_wrong
from train.tasks.language import LanguageTask


def test_wrong_tokens_are_counted_by_example():
    torch.manual_seed(1)
    hidden, weight = torch.randn(2, 6, 4), torch.randn(9, 4)
    likeliest = (hidden @ weight.T).argmax(-1)
    labels = torch.where(torch.arange(6) < 3, -100, likeliest)
    labels[0, 4] = (labels[0, 4] + 1) % 9
    examples = torch.tensor([[1] * 6, [0] * 6])
    wrong = torch.zeros(3, dtype=torch.int64)
    assert count_wrong(hidden, weight, labels, examples, wrong) == 1
    assert wrong.tolist() == [0, 1, 0]
    count_wrong(hidden, weight, labels, examples, wrong)
    assert wrong.tolist() == [0, 2, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ruler_interval": 0}, "ruler_interval is 0"),
        ({"ruler_lengths": (0,)}, "ruler_lengths is 0"),
        ({"ruler_tasks": ("qa_1",)}, "ruler_tasks is qa_1; each task must be one of niah_single_1"),
        ({"ruler_tasks": ()}, "ruler_tasks is ; name at least one"),
        ({"ruler_tasks": ("vt", "vt")}, "ruler_tasks is vt vt; name each task once"),
        ({"ruler_samples": 3}, "ruler_samples is 3; it must be at least 1 for each"),
        ({"ruler_lengths": (512,)}, "ruler_lengths is 512; it has no effect"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        RulerConfig(**settings)


def test_lengths_are_those_of_the_model_or_less():
    assert RulerConfig().lengths(4096) == [1024, 2048, 4096]
    assert RulerConfig().lengths(1024) == [512, 1024]
    assert RulerConfig(ruler_interval=1, ruler_lengths=(512, 256)).lengths(512) == [256, 512]
    with pytest.raises(
        ValueError,
        match="ruler_lengths has 512, but seq_length is 256, so prompts would be cut",
    ):
        RulerConfig(ruler_interval=1, ruler_lengths=(512,)).lengths(256)


def test_none_on_the_command_line_leaves_out_the_curve_of_a_file(tmp_path, capsys):
    file = tmp_path / "curve.toml"
    file.write_text('[ruler]\nruler_interval = 5\nruler_lengths = [512]\nruler_tasks = ["vt"]\n')
    assert parse_args(["--config", str(file)]).ruler.ruler_lengths == (512,)
    assert capsys.readouterr().err == ""
    assert parse_args(["--config", str(file), "--ruler-interval", "none"]).ruler == RulerConfig()
    assert (
        capsys.readouterr().err
        == f"note: --ruler-interval none removes ruler_lengths, ruler_tasks of {file}\n"
    )
    with pytest.raises(ValueError, match="ruler_lengths is 640; it has no effect"):
        parse_args(["--config", str(file), "--ruler-interval", "none", "--ruler-lengths", "640"])


ASKED = (
    *(
        "--seq-length",
        "640",
        "--init-method-std",
        "0.2",
        "--ruler-interval",
        "1",
        "--ruler-samples",
        "4",
    ),
    *("--ruler-lengths", "512", "640", "--ruler-tasks", "niah_single_1", "niah_multikey_2"),
)
MESHES = (
    "--context-parallel-size 2 --context-parallel-method zigzag",
    "--pipeline-model-parallel-size 2",
)


def answered(rank, world_size, runs, labels=None):
    """Measure the curve of each run's flags, with these answers if given.

    Return what it says, and wrong tokens by example.
    """
    results = []
    for flags in runs:
        with trainer_of(LanguageTask, flags, Records()) as trainer:
            rows = trainer.data.curve._examples
            for row, tokens in zip(rows, labels or [], strict=labels is not None):
                learned = row["labels"] != IGNORE_INDEX
                row["tokens"][learned.nonzero()[1:].flatten()], row["labels"][learned] = (
                    tokens[:-1],
                    tokens,
                )
            shares = trainer.data.curve.measure(trainer.runner)
            results.append((shares, trainer.task.objective.wrong.tolist()))
            written = (
                [greedy(trainer.runner.parts[0], row) for row in rows] if world_size == 1 else None
            )
    return results, rows, written


def greedy(model, row):
    """Write as many tokens as the answer has after the prompt, the likeliest each time."""
    learned, ids = (row["labels"] != IGNORE_INDEX).nonzero().flatten(), row["tokens"].clone()
    ids = torch.cat([ids, ids[:1]])
    ids[learned[0] + 1 :] = 0
    with torch.no_grad():
        for place in learned:
            ids[place + 1] = model(ids[None, :-1])[0, place].argmax()
    return ids[learned + 1]


def test_any_mesh_counts_what_greedy_writing_begins_with(default_data):
    """Some answers are the model's own, some have one other token.

    The last, the first, or one in the middle.
    """
    flags = flags_of(default_data, *ASKED)
    ((shares, wrong),), rows, written = answered(0, 1, [flags])
    right = [
        bool((row["labels"][row["labels"] != IGNORE_INDEX] == continuation).all())
        for row, continuation in zip(rows, written, strict=True)
    ]
    assert [count == 0 for count in wrong] == right
    assert shares == {"ruler_512": 0.0, "ruler_640": 0.0}
    labels = [continuation.clone() for continuation in written]
    for number, place in ((1, -1), (3, 0), (4, 2)):
        labels[number][place] = (labels[number][place] + 1) % 1000
    ((shares, wrong),), _, _ = answered(0, 1, [flags], labels)
    assert [count == 0 for count in wrong] == [number not in (1, 3, 4) for number in range(8)]
    assert shares == {"ruler_512": 50.0, "ruler_640": 75.0}
    for results, _, _ in run_ranks(
        answered, 2, [[*flags, *mesh.split()] for mesh in MESHES], labels
    ):
        assert [share for share, _ in results] == [shares] * len(MESHES)
        assert all(
            [count == 0 for count in counts] == [count == 0 for count in wrong]
            for _, counts in results
        )
