"""Hugging Face models to runs and back, with the same bits, files and greedy tokens.

Few tensors are in memory, and no half is left.
"""

import dataclasses
import json
import os
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.hf.dit import dit_to_original, save_dit
from model.hf.tensors import Weights
from model.registry import architecture_of, build_model
from tests.model.hf.hugging_face import CONFIGS, TOKENS, hugging_face, transformers
from tests.model.models import IMAGE, VIDEO, random_dit
from tools.convert_hf import export_model, import_model, main
from train.checkpoint.api import load_model, save_checkpoint, stored_weights
from train.checkpoint.search import find_checkpoint
from train.config.diffusion import load_config as load_dit_config
from train.config.entries import DiTRunConfig
from train.config.flags import write_toml
from train.config.language import load_config
from train.resume.settings import AVERAGED

OTHERS = ("mistral", "ministral", "qwen2, tied, a window", "qwen3", "llama, dynamic")
FAMILIES = ["llama, llama3", "gpt2", "qwen3_5", "qwen2, yarn", "granite", "smollm3"]
FAMILIES += [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]


def write_tokenizer(folder, entries=61):
    """A tokenizer of single words, with the files that come beside one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"</s>": 0} | {f"w{number}": number for number in range(1, entries)}
    Tokenizer(WordLevel(words, unk_token="</s>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "auto_map": {"x": "code.X"}})
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def published(folder, name, dtype=torch.float32):
    """A folder as transformers writes it, in shards, with a tokenizer.

    Code beside it must not come along.
    """
    theirs = hugging_face(CONFIGS[name]).to(dtype)
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = [9, 11]
    theirs.config.bos_token_id = 7
    theirs.generation_config.do_sample, theirs.generation_config.temperature = True, 0.6
    theirs.save_pretrained(folder, max_shard_size="60KB")
    write_tokenizer(folder)
    (folder / "code.py").write_text("raise SystemExit('code was run')")
    return folder


def tensors(folder):
    return {
        name: weight
        for path in folder.glob("*.safetensors")
        for name, weight in load_file(path).items()
    }


def test_an_import_that_is_ended_says_nothing_of_the_disk(tmp_path, monkeypatch):
    source, read_from = published(tmp_path / "theirs", "mistral"), Weights.__getitem__

    def ended(self, name):
        if "layers.1." in name:
            raise SystemExit(143)
        return read_from(self, name)

    monkeypatch.setattr(Weights, "__getitem__", ended)
    with pytest.raises(SystemExit):
        main(["import", str(source), str(tmp_path / "run")])
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_is_the_import_to_the_bit(tmp_path, name, capsys):
    source = published(
        tmp_path / "theirs", name, torch.bfloat16 if "yarn" in name else torch.float32
    )
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["import", str(source), str(run)]) == 0
    assert main(["export", str(run), str(out), "--max-shard-size", "60KB"]) == 0
    assert f", with the tokenizer and settings of {run}/hf" in capsys.readouterr().out
    before, after = tensors(source), tensors(out)
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype
        for key in before
    )
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert max(path.stat().st_size for path in out.glob("*.safetensors")) < 62_000

    kinds = [
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        for folder in (source, out)
    ]
    digests = [
        {k: v for k, v in kind.config.to_dict().items() if k != "_name_or_path"} for kind in kinds
    ]
    assert digests[0] == digests[1]
    assert kinds[0].generation_config.to_dict() == kinds[1].generation_config.to_dict()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    assert not list(out.glob("*.py"))
    texts = [
        kind.generate(TOKENS[:, :5], do_sample=False, max_new_tokens=4, eos_token_id=None)
        for kind in kinds
    ]
    assert torch.equal(*texts)


def test_a_run_of_an_import_computes_what_theirs_does(tmp_path, monkeypatch, capsys):
    """It has its tokenizer from any folder, and a method of context parallelism for its kind."""
    from tools import sample

    monkeypatch.chdir(tmp_path)
    import_model(published(Path("theirs"), "qwen3"), Path("runs/own"))
    run = tmp_path / "runs" / "own"
    config = load_config(run / "config.toml")
    assert config.data.tokenizer_model == str(run / "hf" / "tokenizer.json")
    assert config.context.context_parallel_method == "striped"
    model = build_model(config.model)
    folder = find_checkpoint(run)
    assert folder.name == "iter_0000000"
    load_model(folder, model, architecture_of(config.model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained("theirs")
    assert (model(TOKENS) - theirs(TOKENS).logits).abs().max() < 1e-5
    sample.main(["--load", str(run), "--num-samples", "1", "--num-tokens", "4"])
    assert "iteration 0" in capsys.readouterr().out
    import_model(published(tmp_path / "hybrid", "olmo_hybrid"), tmp_path / "second")
    assert (
        load_config(tmp_path / "second" / "config.toml").context.context_parallel_method == "zigzag"
    )


@pytest.mark.parametrize(("lengths", "meant_for"), [((32,), 2048), ((4096, 3000, 32), 4096)])
def test_an_export_is_meant_for_what_it_was_trained_on(tmp_path, lengths, meant_for, capsys):
    """By its run, or by those before it."""
    import_model(published(tmp_path / "theirs", "llama"), run := tmp_path / "base")
    (run / "hf" / "tokenizer.json").unlink()
    for length in lengths:
        config = load_config(run / "config.toml")
        began = dataclasses.replace(config.checkpoint, load=str(run), finetune=True)
        train = dataclasses.replace(config.train, seq_length=length)
        config = dataclasses.replace(config, train=train, checkpoint=began)
        run, model = tmp_path / f"of {length}", build_model(config.model)
        run.mkdir()
        (run / "config.toml").write_text(write_toml(config))
        save_checkpoint(run, 3, model, None, architecture=architecture_of(config.model), extra={})
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (
        transformers.AutoConfig.from_pretrained(tmp_path / "out").max_position_embeddings
        == meant_for
    )
    line = capsys.readouterr().out
    assert ("with the settings of" in line, "tokenizer" in line) == (len(lengths) == 1, False)
    assert ("embeddings is 4,096, the length trained on (before: 2,048)" in line) == (
        meant_for == 4096
    )


def test_a_strangers_files_beside_the_tokenizer_are_not_taken(tmp_path):
    """A run that was never imported has a tokenizer, and no more of its folder.

    It is a published model's, or an import's.
    """
    run, stranger = tmp_path / "run", published(tmp_path / "theirs", "llama")
    import_model(stranger, run)
    (run / "hf").rename(tmp_path / "hf")
    for folder in (stranger, tmp_path / "hf"):
        config_text = (run / "config.toml").read_text()
        tokenizer = str(load_config(run / "config.toml").data.tokenizer_model)
        (run / "config.toml").write_text(
            config_text.replace(tokenizer, str(folder / "tokenizer.json"))
        )
        assert "settings of" not in export_model(
            run, tmp_path / f"{folder.name} out", None, None, 10**9
        )
        assert json.loads((tmp_path / f"{folder.name} out" / "config.json").read_text())[
            "eos_token_id"
        ] != [9, 11]


def shard_of(folder):
    return min(folder.glob("model-*.safetensors"))


def leave(path):
    """Move a file out of its folder, and put a link in its place."""
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


def only_pickles(folder):
    for path in (folder / "model.safetensors.index.json", *folder.glob("*.safetensors")):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")


MYSTERY = json.dumps({"model_type": "mystery", "auto_map": {"AutoModel": "x.X"}})
BROKEN = {
    "pickle": (only_pickles, "pytorch_model.bin is a pickle, which can run code"),
    "link of weights": (lambda folder: leave(shard_of(folder)), "is a link that leaves its folder"),
    "link of a tokenizer": (
        lambda folder: leave(folder / "tokenizer.json"),
        "is a link that leaves its folder",
    ),
    "cut": (
        lambda folder: os.truncate(shard_of(folder), shard_of(folder).stat().st_size - 9),
        "is not a complete safetensors file",
    ),
    "remote code": (
        lambda folder: (folder / "config.json").write_text(MYSTERY),
        '/theirs/config.json: model_type = "mystery" is not supported',
    ),
    "file": (
        lambda folder: (shutil.rmtree(folder), folder.touch()),
        "/theirs is a file; give the folder of a model",
    ),
}


def test_a_tokenizer_of_more_entries_than_the_model_is_imported_and_told(tmp_path, capsys):
    source = published(tmp_path / "theirs", "llama, tied")
    write_tokenizer(source, 63)
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    note = (
        "note: the model lacks 2 entries of the tokenizer: token 61 ('w61') is in the tokenizer's "
        "63 entries"
    )
    assert note in capsys.readouterr().out
    assert load_config(tmp_path / "run" / "config.toml").model.vocab_size == 61


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_imported_is_one_line_and_leaves_nothing(tmp_path, capsys, name):
    source = published(tmp_path / "theirs", "llama, tied")
    spoil, words = BROKEN[name]
    spoil(source)
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()  # transformers' own lines
    assert main(["import", str(source), str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert words in message
    assert message.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_written_over_and_a_folder_without_a_name_is_refused(
    tmp_path, monkeypatch, capsys
):
    source, run = published(tmp_path / "theirs", "llama"), tmp_path / "run"
    assert main(["import", str(source), str(run)]) == 0
    for arguments in (["import", str(source), str(run)], ["export", str(run), str(source)]):
        assert main(arguments) == 1
        assert "exists; choose a new folder" in capsys.readouterr().err
    assert main(["export", str(source), str(tmp_path / "out")]) == 1
    assert "has no config.toml" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["import", str(source), "."]) == 1
    assert capsys.readouterr().err == "error: . has no name; give the name of a new folder\n"


def test_a_cache_of_the_hub_has_links_to_its_blobs(tmp_path):
    source = published(tmp_path / "hub" / "snapshots" / "abc", "llama")
    blobs = tmp_path / "hub" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    import_model(source, tmp_path / "run")
    assert not any(path.is_symlink() for path in (tmp_path / "run").rglob("*"))


def test_a_diffusion_transformer_is_exported_as_it_was_imported(tmp_path, capsys):
    state = random_dit(VIDEO).state_dict()
    save_dit(tmp_path / "released", VIDEO, state)
    assert main(["import", f"{tmp_path}/released", f"{tmp_path}/run"]) == 0
    assert "a diffusion transformer of" in capsys.readouterr().out
    assert load_dit_config(tmp_path / "run/config.toml").model == VIDEO
    weights, read = stored_weights(find_checkpoint(tmp_path / "run"), architecture_of(VIDEO))
    assert weights.keys() == state.keys()
    assert all(torch.equal(read(name), state[name]) for name in state)
    assert main(["export", f"{tmp_path}/run", f"{tmp_path}/exported"]) == 0
    assert "weights as trained" in capsys.readouterr().out
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "exported" / name).read_bytes() == (
            tmp_path / "released" / name
        ).read_bytes()


def test_a_trained_diffusion_transformer_gives_its_averages(tmp_path, capsys):
    model, averages = random_dit(IMAGE), random_dit(IMAGE).state_dict()
    averages = {name: weight + 1 for name, weight in averages.items()}
    save_checkpoint(
        tmp_path / "run",
        3,
        [model],
        None,
        architecture=architecture_of(IMAGE),
        extra={AVERAGED: 0.9},
        sections={"ema": averages},
    )
    (tmp_path / "run/config.toml").write_text(write_toml(DiTRunConfig(model=IMAGE)))
    assert main(["export", f"{tmp_path}/run", f"{tmp_path}/exported"]) == 0
    assert "averages of the weights" in capsys.readouterr().out
    weights = load_file(tmp_path / "exported/model.safetensors")
    assert all(
        torch.equal(weights[name], weight)
        for name, weight in dit_to_original(averages, IMAGE).items()
    )


def test_a_few_tensors_live_at_a_time(tmp_path, monkeypatch):
    """A fused one of theirs needs its three parts of ours, and theirs is made of these."""
    alive, peak = set(), [0]
    reads = {Weights: Weights.__getitem__, torch: torch.empty_like}

    def counted(weight):
        alive.add(mark := object())
        weakref.finalize(weight, alive.discard, mark)
        peak[0] = max(peak[0], len(alive))
        return weight

    source = published(tmp_path / "theirs", "gpt2")
    monkeypatch.setattr(
        Weights, "__getitem__", lambda self, name: counted(reads[Weights](self, name))
    )
    import_model(source, tmp_path / "run")
    imported, peak[0] = peak[0], 0
    monkeypatch.setattr(
        torch, "empty_like", lambda like, **kind: counted(reads[torch](like, **kind))
    )
    export_model(tmp_path / "run", tmp_path / "out", None, None, 10**9)
    assert len(tensors(source)) > 20
    assert 1 <= imported <= 3
    assert 1 <= peak[0] <= 9, "a module's weights and biases, and theirs of it"
