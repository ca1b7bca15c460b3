"""Loss by position, of one process against every token's loss one by one.

Any mesh is compared with one process.
"""

import argparse
import json
import math

import pytest
import torch
import torch.nn.functional as F

from data.text.prepare import Request, prepare
from data.tokenizer import load_tokenizer, train_tokenizer
from model.registry import architecture_of, build_model
from runtime.ranks import run_ranks
from tests.data.families import llama_3
from tests.data.text.corpora import write_pair
from tests.model.models import model_config
from tools.common.runs import open_run
from tools.evaluate import buckets, documents, main
from train.checkpoint.api import load_model, save_checkpoint

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
LENGTH, TRAINED = 200, 96
CONFIG = """\
[model]
{shape}
[train]
seq_length = 96
[data]
tokenizer_model = "{tokenizer}"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with a checkpoint whose losses differ by position, and texts.

    Three of these are long enough.
    """
    folder = tmp_path_factory.mktemp("run")
    texts = [
        f"value {i} of the table is {i * i % 97}, and so on\n" * (i % 5) * 4 for i in range(1, 10)
    ]
    tokenizer = train_tokenizer(
        [f"value {i} of the table is, and so on\n" for i in range(300)], folder / "t", 300
    )
    shape = "\n".join(f"{name} = {value}" for name, value in SHAPE.items())
    (folder / "config.toml").write_text(CONFIG.format(shape=shape, tokenizer=tokenizer))
    model = build_model(model_config(**SHAPE, vocab_size=300))
    model.init_weights(1)
    with torch.no_grad():
        model.output.weight.mul_(50)
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(
        folder, 3, model, optimizer, architecture=architecture_of(model.config), extra={}
    )
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    return folder


def arguments(run, save, *flags):
    source = [] if "--data-path" in flags else ["--text", str(run / "texts.jsonl")]
    return [str(run), *source, "--seq-length", str(LENGTH), "--save", str(save), *flags]


def evaluated(run, save, *flags):
    main(arguments(run, save, *flags))
    return json.loads((save / "perplexity.json").read_text())


def rows(run):
    """The first LENGTH + 1 tokens of every text that has more than LENGTH."""
    tokenizer = load_tokenizer(run / "t.model")
    texts = [json.loads(line)["text"] for line in (run / "texts.jsonl").open()]
    ids = [[*tokenizer.tokenize(text), tokenizer.eod] for text in texts]
    return torch.tensor([row[: LENGTH + 1] for row in ids if len(row) > LENGTH])


def by_position(run):
    """The mean loss [S] over the texts at each position."""
    tokens = rows(run)
    model = build_model(model_config(**SHAPE, vocab_size=300))
    load_model(run / "iter_0000003", model, architecture_of(model.config))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).double()
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(0)


def test_each_bucket_is_the_mean_of_its_tokens(run, tmp_path, capsys):
    result = evaluated(run, tmp_path, "--last-tokens", "100")  # which begin inside a bucket
    losses = by_position(run)
    assert result["last"]["loss"] == pytest.approx(losses[-100:].mean().item(), rel=1e-6)
    assert abs(result["last"]["loss"] / losses[-101:-1].mean().item() - 1) > 1e-5
    assert (result["last"]["begin"], result["last"]["end"], result["last"]["tokens"]) == (
        100,
        LENGTH,
        400,
    )
    assert (
        f"| last 100 | 400 | {result['last']['loss']:.4f} |"
        in (tmp_path / "perplexity.md").read_text()
    )
    assert result["documents"] == 4
    assert [(b["begin"], b["end"]) for b in result["buckets"]] == [
        (0, 64),
        (64, 128),
        (128, LENGTH),
    ]
    for bucket in result["buckets"]:
        want = losses[bucket["begin"] : bucket["end"]].mean().item()
        assert bucket["loss"] == pytest.approx(want, rel=1e-6)
        assert bucket["perplexity"] == pytest.approx(math.exp(want), rel=1e-5)
        assert bucket["tokens"] == 4 * (bucket["end"] - bucket["begin"])
    assert result["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    shifted = losses.roll(1)[:64].mean().item()  # negative control: a position off by one is seen
    assert abs(result["buckets"][0]["loss"] / shifted - 1) > 1e-4
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert (
        f"| all | {4 * LENGTH} | {result['loss']:.4f} |" in (tmp_path / "perplexity.md").read_text()
    )
    assert result["trained_seq_length"] == TRAINED
    assert "4 of 4 documents" in capsys.readouterr().out


def test_prepared_text_gives_the_same_numbers(run, tmp_path):
    request = Request(
        inputs=(str(run / "texts.jsonl"),), vocab_size=None, tokenizer_model=str(run / "t.model")
    )
    prepare(request, tmp_path / "texts")
    read, packed = (
        evaluated(run, tmp_path / "a"),
        evaluated(run, tmp_path / "b", "--data-path", f"{tmp_path}/texts"),
    )
    assert read["buckets"] == packed["buckets"]


def test_documents_of_a_pair_are_those_of_its_index_however_they_end(run, tmp_path):
    """Sentences of a document are joined, and texts of one are apart.

    An end token in front ends nothing.
    """
    tokenizer = load_tokenizer(run / "t.model")
    eod = tokenizer.eod
    ids = [*range(20, 50)]
    pairs = [[ids[:12], ids[12:]], [[eod, *ids]], [[*ids[:9], eod, *ids[9:]]], [ids[:20]]]
    prefix = write_pair(tmp_path / "d", pairs)
    arguments = argparse.Namespace(data_path=prefix, seq_length=20, add_bos_token=None)
    opened = open_run(run, None)
    rows = [row.tolist() for row in documents(arguments, opened)]
    assert rows == [ids[:21], [eod, *ids[:20]], ids[9:]]


def on_rank(rank, world_size, commands):
    for argv in commands:
        main(argv)


@pytest.mark.parametrize(
    ("processes", "meshes"),
    [
        (
            4,
            {"": 1e-6, "--context-parallel-size 1": 0.0},
        ),  # each document is one process's, and all sums are exact
        pytest.param(3, {"--context-parallel-size 1": 1e-6}, marks=pytest.mark.slow),
        pytest.param(
            4,
            dict.fromkeys(
                (
                    "--context-parallel-method auto",
                    "--context-parallel-method zigzag",
                    "--tensor-model-parallel-size 2",
                    "--pipeline-model-parallel-size 2 --context-parallel-method ulysses",
                    (
                        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
                        "--context-parallel-size 1"
                    ),
                ),
                1e-6,
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_any_mesh_equals_one_process(run, tmp_path, processes, meshes):
    """Documents need not share out evenly over data-parallel ranks and stages."""
    last = ("--last-tokens", "100")
    commands = [
        arguments(run, tmp_path / str(n), *flags.split(), *last) for n, flags in enumerate(meshes)
    ]
    run_ranks(on_rank, processes, commands)
    want = evaluated(run, tmp_path / "one", *last)
    for number, (flags, bound) in enumerate(meshes.items()):
        got = json.loads((tmp_path / str(number) / "perplexity.json").read_text())
        for bucket, alone in zip(
            [*got["buckets"], got["last"]], [*want["buckets"], want["last"]], strict=True
        ):
            assert bucket["tokens"] == alone["tokens"]
            assert abs(bucket["loss"] / alone["loss"] - 1) <= bound, flags


def test_buckets_double():
    assert buckets(1024) == [0, 64, 128, 256, 512, 1024]
    assert buckets(64) == [0, 64]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq-length", "100000"], "has no document of more than 100000 tokens"),
        (
            ["--last-tokens", "201"],
            "--last-tokens is 201, but --seq-length is 200; give a smaller --last-tokens",
        ),
        (["--ckpt-step", "7"], "ckpt_step is 7"),
        (["--data-path", "none"], "none.idx does not exist"),
        (["--context-parallel-size", "2"], "context_parallel_size is 2, but this is one process"),
        (
            ["--context-parallel-method", "rings"],
            "context_parallel_method is 'rings'; it must be one of",
        ),
    ],
)
def test_bad_input_is_named(run, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        main(arguments(run, tmp_path, *flags))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"has no config\.toml; name the folder"):
        main(arguments(tmp_path, tmp_path))


def test_a_text_begins_with_what_its_tokenizer_adds(tmp_path):
    """The loss is that of transformers' ids, whose first one is the begin token."""
    from transformers import AutoTokenizer

    path = llama_3(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    shape = "\n".join(f"{name} = {value}" for name, value in SHAPE.items())
    (tmp_path / "config.toml").write_text(CONFIG.format(shape=shape, tokenizer=path))
    model = build_model(model_config(**SHAPE, vocab_size=len(theirs)))
    model.init_weights(1)
    with torch.no_grad():
        model.output.weight.mul_(50)
    save_checkpoint(tmp_path, 1, model, None, architecture=architecture_of(model.config), extra={})
    text = "a value of the table is, and so on " * 20
    (tmp_path / "text.txt").write_text(text)
    for flags, begins in ([], True), (["--add-bos-token", "never"], False):
        command = [
            str(tmp_path),
            "--text",
            str(tmp_path / "text.txt"),
            "--seq-length",
            "32",
            "--save",
            str(tmp_path),
        ]
        main([*command, *flags])
        (bucket,) = json.loads((tmp_path / "perplexity.json").read_text())["buckets"]
        ids = torch.tensor([theirs(text)["input_ids"][not begins :][:33]])
        with torch.no_grad():
            want = F.cross_entropy(model(ids[:, :-1])[0].double(), ids[0, 1:]).item()
        assert bucket["loss"] == pytest.approx(want, rel=1e-5)
