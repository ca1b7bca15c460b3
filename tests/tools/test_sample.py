import dataclasses
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
import torch

from data.fingerprint import digest
from data.tokenizer import load_tokenizer, train_tokenizer
from model.decoder import Decoder
from model.registry import architecture_of, build_model
from runtime.ranks import run_ranks
from tests.data.family_files import begins_with
from tests.model.models import generate, model_config
from tools import sample
from train.checkpoint.api import save_checkpoint
from train.generation import Writer
from train.run import exit_status

SHAPE = model_config(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=300)
GREEDY = ("--temperature", 0, "--num-samples", 1)
CONFIG = """\
[model]
num_layers = 1
hidden_size = 16
num_attention_heads = 2
[train]
seq_length = 64
[data]
tokenizer_model = "{tokenizer}"
"""


def write_run(folder, model, more="", *, iteration=1, entries=300, tokenizer=None, **extra):
    """Write a run of a model, with ``more`` in its [model].

    Where no tokenizer is named, it has one of so many entries.
    """
    if tokenizer is None:
        tokenizer = train_tokenizer(
            [f"value {i} of the table\n" for i in range(300)], folder / "tokenizer", entries
        )
    (folder / "config.toml").write_text(
        CONFIG.format(tokenizer=tokenizer).replace("[train]", f"{more}\n[train]")
    )
    if not (
        folder / f"iter_{iteration:07d}"
    ).exists():  # another configuration for the same weights
        save_checkpoint(
            folder, iteration, model, None, architecture=architecture_of(model.config), extra=extra
        )
    return load_tokenizer(tokenizer)


def model_of(**shape):
    model = build_model(dataclasses.replace(SHAPE, **shape))
    model.init_weights(1)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder: checkpoints of iterations 1 and 2, whose weights differ.

    Its config.toml has no vocab_size.
    """
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, trained(1))
    write_run(folder, trained(2), iteration=2, tokenizer=folder / "tokenizer.model")
    with (folder / "config.toml").open("a") as config:
        config.write(f'[mesh]\ncontext_parallel_size = 2\n[checkpoint]\nload = "{folder}"\n')
    return folder


def main(argv):
    return exit_status(sample.main, argv)


def trained(iteration):
    """Weights large enough that texts tell them apart."""
    model = Decoder(SHAPE)
    model.init_weights(iteration)
    with torch.no_grad():
        model.output.weight.mul_(50)
    return model


def sampled(capsys, *args):
    assert main([str(arg) for arg in args]) == 0
    return capsys.readouterr()


def texts(out):
    return [text.removesuffix("\n") for text in out.split("-" * 80 + "\n")[1:]]


def greedy(run, iteration):
    tokenizer = load_tokenizer(run / "tokenizer.model")
    prompt = tokenizer.tokenize("value 1")
    (ids,) = generate(trained(iteration), [prompt], 12, stop=[tokenizer.eod])
    return tokenizer.detokenize([*prompt, *ids])


@pytest.mark.parametrize(("step", "iteration"), [((), 2), (("--ckpt-step", 1), 1)])
def test_prints_what_the_weights_of_the_checkpoint_write(run, capsys, step, iteration):
    out = sampled(
        capsys, "--load", run, *step, "--prompt", "value 1", "--num-tokens", 12, *GREEDY
    ).out
    assert f"iteration {iteration}," in out
    assert texts(out) == [greedy(run, iteration)]
    assert greedy(run, 1) != greedy(run, 2)


def test_vocabulary_larger_than_the_tokenizers(tmp_path, capsys):
    """Entries that pad the vocabulary have no text."""
    model = trained(1)
    with torch.no_grad():
        model.output.weight[:280] = 0
    write_run(tmp_path, model, "vocab_size = 300", entries=280)
    assert sampled(
        capsys, "--load", tmp_path, "--prompt", "value", "--temperature", 0
    ).out.endswith("-\nvalue\n")


def test_a_prompt_with_a_token_that_the_model_lacks_is_refused_by_name(tmp_path, capsys):
    model = model_of(vocab_size=299)
    write_run(tmp_path, model, "vocab_size = 299")
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    assert (
        "iteration 1,"
        in sampled(capsys, "--load", tmp_path, "--prompt", "value", "--num-tokens", 1).out
    )
    text = tokenizer.detokenize([299])
    assert tokenizer.tokenize(text) == [299]
    assert main(["--load", str(tmp_path), "--prompt", text]) == 1
    assert f"token 299 ({text!r}) is in the tokenizer's 300 entries" in capsys.readouterr().err


def test_a_diverged_model_is_named_in_one_line(tmp_path, capsys):
    model = model_of()
    with torch.no_grad():
        model.embedding.weight.mul_(float("nan"))
    write_run(tmp_path, model, iteration=3)
    assert main(["--load", str(tmp_path), "--num-tokens", "9"]) == 1
    captured = capsys.readouterr()
    assert "-" * 80 not in captured.out
    assert re.fullmatch(
        r"error: .*/iter_0000003 cannot write text, because its training diverged: .*\n",
        captured.err,
    )


def test_another_tokenizer_than_the_checkpoints_is_refused(run, tmp_path, capsys):
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes((run / "tokenizer.model").read_bytes())
    write_run(
        tmp_path,
        trained(1),
        tokenizer=tokenizer,
        contents={"tokenizer_model": (was := digest(tokenizer))},
    )
    assert "iteration 1," in sampled(capsys, "--load", tmp_path, "--num-tokens", 2).out
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"value", b"walue", 1))
    assert main(["--load", str(tmp_path), "--num-tokens", "2"]) == 1
    message = (
        rf"error: {tokenizer} is not the tokenizer that .*digest {was[:8]}, "
        rf"now {digest(tokenizer)[:8]}\); put .*\n"
    )
    assert re.fullmatch(message, capsys.readouterr().err)


def test_seed_and_top_p_decide_the_samples(run, capsys):
    command = ["--load", run, "--num-tokens", 20, "--temperature", 2]
    first, same, other = (sampled(capsys, *command, "--seed", seed).out for seed in (1, 1, 2))
    assert first == same != other
    assert first.count("-" * 80) == 2
    likeliest = sampled(capsys, *command, "--temperature", 0).out
    assert sampled(capsys, *command, "--top-p", 1e-6).out == likeliest != first


def test_says_so_beyond_the_trained_length(run, tmp_path, capsys):
    assert "exceed 64 tokens" in sampled(capsys, "--load", run, "--num-tokens", 70).err
    assert not sampled(capsys, "--load", run, "--num-tokens", 40).err
    # An import's config.toml says no length that it was trained on: what it is meant for counts, if
    # it says so.
    for meant, warning in (
        ("", ""),
        ("max_position_embeddings = 48", "exceed 48 tokens, the length of the"),
    ):
        write_run(tmp_path, trained(1), meant, iteration=0, imported_from="elsewhere")
        assert warning in (
            err := sampled(capsys, "--load", tmp_path, "--num-tokens", 70, "--top-k", 1).err
        )
        assert bool(warning) == bool(err)


def test_bad_input_gives_one_message(run, tmp_path, capsys):
    def error(*args):
        assert main([str(arg) for arg in args]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert re.fullmatch("error: .*\n", captured.err)
        return captured.err

    assert "config.toml" in error("--load", tmp_path)
    assert "ckpt_step is 7" in error("--load", run, "--ckpt-step", 7)
    config = (run / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(config)
    assert "holds no checkpoint" in error("--load", tmp_path)
    (tmp_path / "config.toml").write_text(config[: config.index("[data]")])
    assert "tokenizer_model is not set" in error("--load", tmp_path)
    (tmp_path / "config.toml").write_text(
        config.replace("[data]", "[diffusion]\nobjective = 'ddpm'\n[data]")
    )
    assert "is a run of a diffusion transformer, which does not generate text" in error(
        "--load", tmp_path
    )
    (tmp_path / "config.toml").write_text(config.replace("hidden_size = 16", "hidden_size = 32"))
    (tmp_path / "iter_0000002").symlink_to(run / "iter_0000002")
    assert "32" in error("--load", tmp_path)


def test_a_file_of_prompts_is_continued_whole_or_line_by_line(run, tmp_path, monkeypatch, capsys):
    file, lines = tmp_path / "prompts.txt", ["value 1", "value 12\u2028of the", "table"]
    file.write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    command = ["--load", run, "--num-tokens", 9, *GREEDY]
    alone = [texts(sampled(capsys, *command, "--prompt", line).out)[0] for line in lines]
    out = sampled(capsys, *command, "--prompt-file", file, "--by-line").out
    assert "3 prompts, 1 x 9 tokens" in out
    assert [line + text for line, text in zip(lines, texts(out), strict=True)] == alone
    whole = texts(sampled(capsys, *command, "--prompt", file.read_text()).out)
    assert [
        file.read_text() + text
        for text in texts(sampled(capsys, *command, "--prompt-file", file).out)
    ] == whole
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    (tmp_path / "empty.txt").write_bytes(b"\n \n")
    monkeypatch.chdir(tmp_path)
    warnings = {
        "bad.txt": "not UTF-8",
        "empty.txt": "only empty lines",
        "none.txt": "does not exist",
        ".": "is a folder",
    }
    for name, warning in warnings.items():
        assert main([*map(str, command), "--prompt-file", name, "--by-line"]) == 1
        assert warning in capsys.readouterr().err


def test_a_text_ends_before_a_token_that_stop_names(run, capsys):
    tokenizer = load_tokenizer(run / "tokenizer.model")
    prompt = [tokenizer.eod, *tokenizer.tokenize("value 1")]
    (ids,) = generate(trained(2), [prompt], 12, stop=[tokenizer.eod])
    command = ["--load", run, "--prompt", "value 1", "--num-tokens", 12, *GREEDY]
    expected = tokenizer.detokenize([*prompt[1:], *ids[: ids.index(ids[3])]])
    assert texts(sampled(capsys, *command, "--stop", ids[3]).out) == [expected]
    (spelled,) = [i for i in tokenizer.tokenize("of") if i] or [None]
    assert texts(sampled(capsys, *command, "--stop", "of").out) == texts(
        sampled(capsys, *command, "--stop", spelled).out
    )
    for stop in ("no one token", "300"):
        assert main([*map(str, command), "--stop", stop]) == 1
        assert f"--stop has '{stop}', but that is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("adds", "flags", "begins", "imported"),
    [
        (True, "", [1], True),
        (False, "", [], False),
        (False, "--add-bos-token always", [1], False),
        (True, "--add-bos-token never", [], True),
    ],
)
def test_a_prompt_begins_with_what_the_tokenizer_adds(
    tmp_path, monkeypatch, capsys, adds, flags, begins, imported
):
    """It has a begin token in any case. The folder was moved, but its tokenizer went with it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"</s>": 0, "<s>": 1} | {f"w{number}": number for number in range(2, 300)}
    backend = Tokenizer(WordLevel(words, unk_token="</s>"))
    if adds:
        backend.post_processor = begins_with("<s>", 1)
    (tmp_path / "hf").mkdir()
    backend.save(str(tmp_path / "hf" / "tokenizer.json"))
    tokens = {"eos_token": "</s>", "bos_token": {"content": "<s>"}}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(tokens))
    (tmp_path / "config.toml").write_text(CONFIG.format(tokenizer="/moved/hf/tokenizer.json"))
    extra = {"imported_from": "elsewhere"} if imported else {}
    save_checkpoint(tmp_path, 1, trained(1), None, architecture=architecture_of(SHAPE), extra=extra)
    prompts, write = [], Writer.write
    monkeypatch.setattr(
        Writer,
        "write",
        lambda self, prompt_texts, *n, **k: (
            prompts.extend(prompt_texts),
            write(self, prompt_texts, *n, **k),
        )[1],
    )
    sampled(
        capsys,
        "--load",
        tmp_path,
        "--prompt",
        "w7",
        "--num-tokens",
        2,
        "--num-samples",
        1,
        *flags.split(),
    )
    assert prompts == [[*begins, 7]]


def sampled_on_rank(rank, world_size, commands):
    """Output, errors and status of each command."""
    results = []
    for flags in commands:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            status = main(flags)
        results.append((out.getvalue(), err.getvalue(), status))
    return results


@pytest.mark.slow
def test_two_processes_write_what_one_does(run, capsys):
    """And one of them tells of an error."""
    flags = ["--load", str(run), "--prompt", "value 1", "--num-tokens", "12", "--seed", "3"]
    meshes = [
        "",
        "--tensor-model-parallel-size 2",
        "--context-parallel-method nope",
        "--context-parallel-method auto",
    ]
    commands = [[*flags, *mesh.split()] for mesh in meshes]
    ranks = run_ranks(sampled_on_rank, 2, commands)
    shared, split, wrong, auto = zip(*ranks, strict=True)
    printed = lambda command: "".join(out for out, _, _ in command)  # noqa: E731
    alone = sampled(capsys, *flags).out
    assert printed(shared) == printed(split) == alone != ""
    assert [status for _, _, status in wrong] == [1, 1]
    assert "".join(err for _, err, _ in wrong).count("error: context_parallel_method") == 1
    first_line, rest = printed(auto).split("\n", 1)
    assert first_line.startswith("context parallelism: ")
    assert ", predicted to take " in first_line  # whatever the run was trained with
    assert rest == alone
