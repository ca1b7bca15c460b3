"""Answers counted by task and length.

They are of writers whose errors are known, and of a model as by hand, on any mesh.
"""

import json
import re

import pytest
import torch

from data.chat.template import load_template
from data.tokenizer import load_tokenizer
from model.registry import architecture_of, build_model
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.data.chat.templates import TEMPLATES, write_tokenizer
from tests.model.models import model_config
from tools.common.arguments import UsageError
from tools.ruler import __main__ as command
from tools.ruler import answers, examples, lines
from tools.ruler.answers import Cell, ask_all, heat_map, table
from tools.ruler.prompts import Prompts
from tools.ruler.tasks import Sources
from train.checkpoint.api import save_checkpoint


class Writer:
    """A model that writes ``answer`` of a prompt's text."""

    replica, replicas, group = 0, 1, None

    def __init__(self, tokenizer, answer):
        self.tokenizer, self.answer, self.asked, self.stop = tokenizer, answer, [], set()

    def write(self, prompts, max_new_tokens, *, stop=()):
        self.asked.append((len(prompts), max_new_tokens))
        self.stop |= set(stop)
        texts = (self.answer(self.tokenizer.detokenize(prompt)) for prompt in prompts)
        return [self.tokenizer.tokenize(text)[:max_new_tokens] for text in texts]


def of_record(text):
    """Look the line up, and err in the middle of the record."""
    record = re.findall(r"^(\S+ \S+) (\S+)$", text, flags=re.MULTILINE)
    names = [name for name, _ in record]
    index = names.index(re.search(r"(\S+ \S+)\?$", text, flags=re.MULTILINE)[1])
    return " apple " if 0.4 < index / (len(names) - 1) < 0.6 else record[index][1]


def of_needle(text):
    """Say what follows the asked key in the text, and of several keys only that of the first."""
    key = text.rpartition(" for ")[2].split(" mentioned")[0].split(",")[0]
    return text.split(f" for {key} is: ")[1].split(".")[0]


def line_task(length):
    return lines.LineTask(tokens=length, purpose="score", seed=1, vocabulary="small")


def test_known_errors_are_counted_where_they_are(tokenizer, chat):
    writer = Writer(tokenizer, of_record)
    makers = [
        lines.LineMaker(line_task(length), chat, depth, 3)
        for length in (300, 600)
        for depth in range(3)
    ]
    cells = [ask_all(writer, maker, 5, 2).entry() for maker in makers]
    assert [
        (cell["task"], cell["length"], cell["score"], len(cell["wrong"])) for cell in cells
    ] == [
        (f"line_retrieval {depth}%", length, *((0, 3) if depth == 50 else (100, 0)))
        for length in (300, 600)
        for depth in (0, 50, 100)
    ]
    assert [size for size, _ in writer.asked] == [2, 2, 1] * 6
    assert {wrong["written"] for cell in cells for wrong in cell["wrong"]} == {"apple"}
    assert {tokenizer.detokenize([token], special=True) for token in writer.stop} == {
        "</s>",
        "<|im_end|>",
    }


@pytest.mark.parametrize(
    ("task", "share"), [("niah_single_2", 100), ("niah_multikey_2", 100), ("niah_multiquery", 25)]
)
def test_known_answers_are_counted(tokenizer, chat, task, share):
    writer = Writer(tokenizer, of_needle)
    cell = ask_all(writer, examples.ExampleMaker(task, 2000, 1, chat, Sources()), 5, 2).entry()
    assert (cell["task"], cell["length"], cell["score"]) == (task, 2000, share)
    assert writer.asked == [(2, 128), (2, 128), (1, 128)]
    assert len(cell["wrong"]) == (0 if share == 100 else 3)


def test_the_table_has_averages_and_the_effective_length_and_the_picture_the_shares():
    shares = {
        ("vt", 4096): [1.0, 0.8],
        ("cwe", 4096): [0.9],
        ("vt", 8192): [0.7],
        ("cwe", 8192): [1.0],
    }
    cells = [
        Cell(*place, [(share, {}) for share in shares_of_samples])
        for place, shares_of_samples in shares.items()
    ]
    assert table(cells)[2:5] == [
        "| vt | 90.0 | 70.0 | 80.0 |",
        "| cwe | 90.0 | 100.0 | 95.0 |",
        "| average | 90.0 | 85.0 | 87.5 |",
    ]
    assert table(cells)[-1].startswith(
        "effective length: 4096 (the longest whose average is above 85.6"
    )
    assert table(cells[2:])[-1].startswith("effective length: less than all of these")
    assert table(
        [
            *cells,
            Cell("line_retrieval 0%", 4096, [(1.0, {})]),
            Cell("line_retrieval 0%", 8192, [(0.0, {})]),
        ]
    )[-1].startswith("| average |")
    axes, bar = heat_map(cells).axes
    assert [text.get_text() for text in axes.texts] == ["90%", "70%", "90%", "100%"]
    assert axes.images[0].get_array().tolist() == [[pytest.approx(0.9), 0.7], [0.9, 1.0]]
    assert bar.get_ylabel() == "right answers"


SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def run_of(folder, template=TEMPLATES["chatml"], scale=50.0, **shape):
    """A run's folder with a checkpoint of random weights."""
    tokenizer = write_tokenizer(folder / "tokenizer", template)
    model = build_model(
        model_config(**SHAPE, **shape, vocab_size=load_tokenizer(tokenizer).vocab_size)
    )
    model.init_weights(1)
    with torch.no_grad():
        model.output_weight.mul_(scale)
    settings = [f"{name} = {json.dumps(value)}" for name, value in (SHAPE | shape).items()]
    settings = [
        "[model]",
        *settings,
        "[train]",
        "seq_length = 128",
        "[data]",
        f'tokenizer_model = "{tokenizer}"',
    ]
    (folder / "config.toml").write_text("\n".join(settings))
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(
        folder, 1, model, optimizer, architecture=architecture_of(model.config), extra={}
    )
    question = {"question": "Who?", "answers": ["Ada"], "paragraphs": ["It was Ada."]}
    (folder / "asked.jsonl").write_text(json.dumps(question))
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run_of(folder)


@pytest.fixture(scope="module")
def run_with_positions(tmp_path_factory):
    """A run whose model has a table of positions."""
    folder = tmp_path_factory.mktemp("gpt")
    run_of(folder, model_type="gpt")
    return folder


def scored(folder, *flags, save="evaluation"):
    """Score the task with the shortest answers, and lines.

    Each token of these is a step of all processes.
    """
    score_command = [
        "--tasks",
        "qa_1",
        "line_retrieval",
        "--qa-1",
        str(folder / "asked.jsonl"),
        "--lengths",
        "1000",
    ]
    score_command += ["--samples", "2", "--save", str(folder / save)]
    if "--tasks" not in flags or "line_retrieval" in flags:
        score_command += ["--depths", "2", "--vocabulary", "small"]
    answers.score_run(command._parse(["score", str(folder), *score_command, *flags]))
    file = folder / save / "ruler.json"
    return (
        json.loads(file.read_text())["cells"] if file.exists() else None
    )  # ranks but the first are ahead of it


def written_by_hand(model, prompts, ids, new_tokens):
    ids, begin = list(ids), len(ids)
    with torch.no_grad():
        while len(ids) < begin + new_tokens and ids[-1] not in prompts.ends:
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    return prompts.text([token for token in ids[begin:] if token not in prompts.ends])


def test_a_run_is_asked_and_its_answers_are_its_own(run, capsys):
    folder, model = run
    cells = scored(folder, "--tasks", "fwe", "line_retrieval", "--samples", "1")
    assert [(cell["task"], cell["length"], len(cell["scores"])) for cell in cells] == [
        (task, 1000, 1) for task in ("fwe", "line_retrieval 0%", "line_retrieval 100%")
    ]
    tokenizer = load_tokenizer(folder / "tokenizer" / "tokenizer.json")
    base, chat = Prompts(tokenizer), Prompts(tokenizer, load_template(tokenizer.path))
    makers = (
        examples.ExampleMaker("fwe", 1000, 1, base, Sources()),
        lines.LineMaker(line_task(1000), chat, 0, 2),
    )
    for cell, maker in zip(cells, makers, strict=False):
        example = maker.make(0)
        text = written_by_hand(model, maker.prompts, example.ids, example.new_tokens)
        assert cell["wrong"] == [
            {"number": 0, "answers": list(example.question.answers), "written": text}
        ]
    output = capsys.readouterr().out
    assert "1000 tokens, line_retrieval 100%: 0.0" in output
    assert "| line_retrieval 100% | 0.0 | 0.0 |" in output
    assert (
        "1 examples of each task and length; RULER's prompts as for a base model, haystack of "
        "generated sentences"
    ) in output
    assert "seq_length 1000 is 3.91 times the 256 positions" in output
    assert (folder / "evaluation" / "ruler.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "evaluation" / "ruler.md").is_file()


def test_a_table_of_positions_is_scored_to_its_end(run_with_positions):
    """The longest answer that is waited for would go beyond it."""
    cells = scored(
        run_with_positions, "--lengths", "256", "--tasks", "line_retrieval", "--samples", "1"
    )
    assert [len(cell["scores"]) for cell in cells] == [1, 1]


def scored_on_rank(rank, world_size, folder, meshes, broken):
    for number, flags in enumerate(meshes):
        scored(folder, "--samples", "3", *flags, save=str(number))
    # the first copy alone has a question, of a model that overflows; the others wait for its answer
    if broken:
        with pytest.raises(UserError, match="the logits of the next token are not finite"):
            scored(broken, "--tasks", "qa_1", "--samples", "1", *COPIES)


COPIES = ("--context-parallel-size", "1")
OTHERS = [
    ("--tensor-model-parallel-size", "2", *COPIES),
    ("--context-parallel-size", "2", "--batch-size", "2", "--chat"),
    ("--pipeline-model-parallel-size", "2", *COPIES),
    (),
    ("--context-parallel-method", "auto"),
]


@pytest.mark.parametrize("meshes", [[COPIES], pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_any_processes_score_the_same(run, tmp_path, meshes):
    """Three questions at each place.

    Copies of the model so have different numbers of them or none.
    """
    folder, _ = run
    alone = {
        chat: scored(folder, "--samples", "3", *["--chat"] * chat)
        for chat in {"--chat" in m for m in meshes}
    }
    broken = tmp_path if meshes == [COPIES] else None
    if broken:
        run_of(broken, scale=float("nan"))
    run_ranks(scored_on_rank, 4, folder, meshes, broken)
    for number, flags in enumerate(meshes):
        cells = json.loads((folder / str(number) / "ruler.json").read_text())["cells"]
        assert cells == alone["--chat" in flags]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--lengths", "300"],
            r"qa_1 takes at least \d+ tokens and 32 for the answer, but a length is",
        ),
        (
            ["--tasks", "cwe", "qa_1"],
            r"cwe takes .* a length is 1000; give .* or leave out the task: --tasks qa_1",
        ),
        (
            ["--tasks", "qa_2"],
            "--tasks has qa_2, but its questions come from a file; give HotpotQA's JSON with --qa",
        ),
        (
            ["--tasks", "niah"],
            "--tasks has niah, but there is no such task; choose from niah_single_1, ",
        ),
        (
            ["--tasks", "vt", "--essays", "nowhere.txt"],
            "essays is nowhere.txt, but it cannot be read",
        ),
        (
            ["--tasks", "qa_2", "--qa-2", "nowhere.json"],
            "nowhere.json has no questions that can be read",
        ),
        (
            ["--lengths", "99999999"],
            "--lengths has 99999999, but texts have at most 16777216 tokens",
        ),
        (["--tasks", "line_retrieval", "--lengths", "40"], "a length is 40; give longer --lengths"),
        (
            ["--tasks", "qa_1", "--vocabulary", "small"],
            "--vocabulary needs --tasks line_retrieval",
        ),
        (["--depths", "0"], "--depths: '0' is not an integer of 1 or more"),
        (["--form", "repeat"], "--form: invalid choice: 'repeat'"),
    ],
)
def test_what_cannot_be_asked_is_named_before_the_processes_join(run, flags, message, monkeypatch):
    monkeypatch.delattr(answers, "opened")
    with pytest.raises((UserError, UsageError), match=message):
        scored(run[0], *flags)


def test_runs_that_cannot_be_asked_are_named(tmp_path, run_with_positions):
    with pytest.raises(
        UserError, match="--lengths has 1000, but the model has max_position_embeddings 256"
    ):
        scored(run_with_positions)
    run_of(tmp_path, template=None)
    with pytest.raises(UserError, match="has no chat template"):
        scored(tmp_path)
