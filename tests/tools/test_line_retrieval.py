"""Answers counted by length and depth: of a writer whose errors are known, and of a model."""

import json
import re

import pytest
import torch

from data.chat.template import load_template
from data.tokenizer import load_tokenizer
from model.config import ModelConfig
from model.registry import architecture_of, build_model
from runtime.ranks import RankError, run_ranks
from tests.data.chat.templates import TEMPLATES, write_tokenizer
from tools import line_retrieval as command
from tools.common.arguments import UsageError
from tools.line_retrieval import SPARE, depths_of, entry, places, score_lines, table
from tools.ruler.answers import Cell, ask_all, heat_map
from tools.ruler.examples import Prompts
from tools.ruler.lines import Maker, Task
from train.checkpoint.api import save_checkpoint


class Knowing:
    """Answers by looking the line up, and errs in the middle of the record."""

    replica, replicas, group = 0, 1, None

    def __init__(self, tokenizer):
        self.tokenizer, self.batches, self.stop = tokenizer, [], set()

    def write(self, prompts, max_new_tokens, *, stop=()):
        self.batches.append(len(prompts))
        self.stop |= set(stop)
        return [self._answer(self.tokenizer.detokenize(prompt))[:max_new_tokens] for prompt in prompts]

    def _answer(self, text):
        record = re.findall(r"^(\S+ \S+) (\S+)$", text, flags=re.MULTILINE)
        names = [name for name, _ in record]
        asked = names.index(re.search(r"(\S+ \S+)\?$", text, flags=re.MULTILINE)[1])
        middle = 0.4 < asked / (len(names) - 1) < 0.6
        return self.tokenizer.tokenize(" apple " if middle else record[asked][1])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["chatml"]))


def makers(tokenizer, *lengths):
    template = load_template(tokenizer.path)
    tasks = [Task(tokens=length, purpose="score", seed=1, vocabulary="small") for length in lengths]
    return [Maker(task, template, tokenizer) for task in tasks]


def test_known_errors_are_counted_where_they_are(tokenizer):
    writer = Knowing(tokenizer)
    asked = places(makers(tokenizer, 300, 600), depths_of(3))
    cells = [entry(ask_all(writer, place, 5, 2)) for place in asked]
    assert [tuple(cell[name] for name in ("length", "depth", "samples", "right")) for cell in cells] == [
        (length, depth, 5, 0 if depth == 0.5 else 5) for length in (300, 600) for depth in (0.0, 0.5, 1.0)
    ]
    assert writer.batches == [2, 2, 1] * 6
    assert [len(cell["wrong"]) for cell in cells] == [0, 3, 0] * 2
    assert {wrong["written"] for cell in cells for wrong in cell["wrong"]} == {"apple"}
    assert {tokenizer.detokenize([token], special=True) for token in writer.stop} == {"</s>", "<|im_end|>"}


def test_the_table_and_the_picture_show_the_shares(tmp_path):
    rights = {(512, 0.0): 10, (512, 1.0): 9, (1024, 0.0): 0, (1024, 1.0): 5}
    cells = [Cell(depth, length, [(n < right, {}) for n in range(10)]) for (length, depth), right in rights.items()]
    assert table(cells) == [
        "| tokens | 0% | 100% | all |",
        "| ---: | ---: | ---: | ---: |",
        "| 512 | 100% | 90% | 95.0% |",
        "| 1024 | 0% | 50% | 25.0% |",
    ]
    axes, bar = heat_map(cells, str, "depth", "exact answers").axes
    assert [text.get_text() for text in axes.texts] == ["100%", "0%", "90%", "50%"]
    assert axes.images[0].get_array().tolist() == [[1.0, 0.0], [0.9, 0.5]]
    assert bar.get_ylabel() == "exact answers"
    assert depths_of(1) == [0.5]
    assert depths_of(5) == [0.0, 0.25, 0.5, 0.75, 1.0]


SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 256}


def run_of(folder, template, scale=50.0, **shape):
    """A run's folder with a checkpoint of random weights."""
    tokenizer = write_tokenizer(folder / "tokenizer", template)
    model = build_model(ModelConfig(**SHAPE, **shape, vocab_size=load_tokenizer(tokenizer).vocab_size))
    model.init_weights(1)
    with torch.no_grad():
        model.output_weight.mul_(scale)
    lines = [f"{name} = {json.dumps(value)}" for name, value in (SHAPE | shape).items()]
    settings = ["[model]", *lines, "[train]", "seq_length = 128", "[data]", f'tokenizer_model = "{tokenizer}"']
    (folder / "config.toml").write_text("\n".join(settings))
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(folder, 1, model, optimizer, architecture=architecture_of(model.config), extra={})
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run_of(folder, TEMPLATES["chatml"])


def scored(folder, *flags):
    argv = ["score", str(folder), "--lengths", "200", "300", "--depths", "2", "--samples", "2", "--vocabulary", "small"]
    score_lines(command._parse([*argv, *flags]))
    return json.loads((folder / "evaluation" / "line_retrieval.json").read_text())["cells"]


def test_a_run_is_asked_and_its_answers_are_its_own(run, tokenizer, capsys):
    folder, model = run
    cells = scored(folder)
    assert [(cell["length"], cell["depth"], cell["samples"]) for cell in cells] == [
        (200, 0.0, 2), (200, 1.0, 2), (300, 0.0, 2), (300, 1.0, 2)
    ]  # fmt: skip
    (maker,) = makers(tokenizer, 200)
    turns = maker.make(0, 0.0).turns
    answer, prompt = turns[-1]["content"], maker.prompt(turns)
    ids, ends = list(prompt), Prompts(tokenizer, maker.template).ends
    with torch.no_grad():
        while len(ids) < len(prompt) + len(answer) + SPARE and ids[-1] not in ends:
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    written = tokenizer.detokenize(ids[len(prompt) :]).strip()  # without the special token that ends it
    assert cells[0]["wrong"][0] == {
        "question": turns[0]["content"].splitlines()[-1],
        "answer": answer,
        "written": written,
    }
    said = capsys.readouterr().out
    assert "200 tokens, depth 0%: 0 of 2 right" in said
    assert "| 300 | 0% | 0% | 0.0% |" in said
    assert "seq_length 300 is 1.17 times the 256 positions" in said
    assert (folder / "evaluation" / "line_retrieval.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "evaluation" / "line_retrieval.md").is_file()


def test_a_table_of_positions_is_scored_to_its_end(tmp_path):
    """The longest answer that is waited for would go beyond it."""
    run_of(tmp_path, TEMPLATES["chatml"], model_type="gpt")
    cells = scored(tmp_path, "--lengths", "256", "--samples", "1")
    assert [cell["samples"] for cell in cells] == [1, 1]


def scored_on_rank(rank, world_size, folder, flags):
    scored(folder, *flags)


COPIES = ("--context-parallel-size", "1")


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, COPIES),
        (4, COPIES),
        pytest.param(4, ("--tensor-model-parallel-size", "2", *COPIES), marks=pytest.mark.slow),
        pytest.param(4, ("--context-parallel-size", "2", "--batch-size", "2"), marks=pytest.mark.slow),
        pytest.param(4, ("--pipeline-model-parallel-size", "2", *COPIES), marks=pytest.mark.slow),
        pytest.param(2, (), marks=pytest.mark.slow),
        pytest.param(2, ("--context-parallel-method", "auto"), marks=pytest.mark.slow),
    ],
)
def test_any_processes_score_the_same(run, processes, flags):
    """Three questions at each place, so that copies of the model have different numbers of them or none."""
    folder, _ = run
    one = scored(folder, "--samples", "3")
    run_ranks(scored_on_rank, processes, folder, ("--samples", "3", *flags))
    assert json.loads((folder / "evaluation" / "line_retrieval.json").read_text())["cells"] == one


def test_a_copy_that_cannot_write_ends_all(tmp_path):
    """The first copy alone has a question, of a model that overflows; the second waits for its answer."""
    run_of(tmp_path, TEMPLATES["chatml"], scale=float("nan"))
    with pytest.raises(RankError, match="the logits of the next token are not finite"):
        run_ranks(scored_on_rank, 2, tmp_path, ("--samples", "1", *COPIES))


def test_what_cannot_be_asked_is_named(tmp_path, run):
    folder, _ = run
    with pytest.raises(ValueError, match="tokens is 40, and a conversation of 1 line and as many questions takes"):
        scored(folder, "--lengths", "40")
    (tmp_path / "gpt").mkdir()
    run_of(tmp_path / "gpt", TEMPLATES["chatml"], model_type="gpt")
    with pytest.raises(ValueError, match="lengths names 300, and the model has max_position_embeddings 256"):
        scored(tmp_path / "gpt")
    (tmp_path / "none").mkdir()
    run_of(tmp_path / "none", None)
    with pytest.raises(ValueError, match="has no chat template"):
        scored(tmp_path / "none")
    with pytest.raises(UsageError, match="--depths: '0' is not an integer of 1 or more"):
        scored(folder, "--depths", "0")
