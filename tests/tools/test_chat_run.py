"""A base model that is trained on conversations.

Its checkpoints, its export and its samples know where turns end.
"""

import json

import pytest
import torch

from data.chat.convert import Chat
from data.text.prepare import prepare
from data.text.record import Request
from data.tokenizer import load_tokenizer
from runtime.ranks import run_ranks
from tests.data.test_tokenizer import write_hugging_face
from tests.pretraining import on_rank
from tools import sample
from tools.convert_hf import export_model, import_model
from train.checkpoint.manifest import read_manifest
from train.checkpoint.search import find_checkpoint
from train.run import exit_status

transformers = pytest.importorskip("transformers")
END, TURN = "<|endoftext|>", "<|im_end|>"
FLAGS = """
    --seq-length 64 --train-iters 60 --lr 1e-2 --min-lr 1e-2 --lr-warmup-iters 2
    --global-batch-size 4 --micro-batch-size 1 --split 1,0,0 --eval-iters 0 --save-interval 60
    --context-parallel-size 1 --sft
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on conversations that begins with an imported base model.

    Its texts end with another token than turns.
    """
    folder = tmp_path_factory.mktemp("chat")
    base = folder / "base"
    base.mkdir()
    path = write_hugging_face(base, END, "<|im_start|>", TURN)
    tokenizer = load_tokenizer(path)
    (base / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": END, "chat_template": "{{ old }}"})
    )
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=256,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    import_model(base, folder / "imported")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for n in range(99)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = Request(
        inputs=(str(folder / "in.jsonl"),),
        vocab_size=None,
        tokenizer_model=str(path),
        chat=Chat(seq_length=64, chat_template="chatml"),
    )
    prepare(request, folder / "data", progress=False)
    flags = [
        *FLAGS.split(),
        "--config",
        f"{folder}/imported/config.toml",
        "--finetune",
        "--load",
        f"{folder}/imported",
    ]
    run_ranks(on_rank, 1, [*flags, "--data-path", f"{folder}/data", "--save", f"{folder}/run"])
    return folder / "run"


def ids_of(run):
    tokenizer = load_tokenizer(run.parent / "base" / "tokenizer.json")
    return tokenizer, tokenizer.tokenize_special(TURN)[0][0], tokenizer.eod


def template_of(run):
    return json.loads((run.parent / "data.json").read_text())["chat"]["chat_template"]


def test_an_export_stops_where_turns_end_in_transformers_and_when_it_is_imported_again(
    run, tmp_path, capsys
):
    tokenizer, turn, end = ids_of(run)
    chat = json.loads((run.parent / "data.json").read_text())["chat"]
    assert chat["ends"] == [turn] != [end]
    assert read_manifest(find_checkpoint(run)).extra["chat"] == chat
    line = export_model(run, tmp_path / "out", None, None, 10**9)
    assert "the chat template of its conversations" in line
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        theirs.chat_template
        == template_of(run)
        == (tmp_path / "out" / "chat_template.jinja").read_text()
    )
    assert "chat_template" not in json.loads(
        (tmp_path / "out" / "tokenizer_config.json").read_text()
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [turn, end]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == [turn, end]
    question = [{"role": "user", "content": "5?"}]
    inputs = theirs.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**inputs, max_new_tokens=20, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ]
    assert written.tolist() == [*tokenizer.tokenize("yes"), turn]
    # As the base's settings have it, it does not stop.
    beyond = model.generate(**inputs, max_new_tokens=20, do_sample=False, eos_token_id=end)
    assert beyond.shape[1] == inputs["input_ids"].shape[1] + 20

    import_model(tmp_path / "out", tmp_path / "again")
    flags = [
        "--load",
        str(tmp_path / "again"),
        "--chat",
        "--prompt",
        "5?",
        "--temperature",
        "0",
        "--num-tokens",
        "20",
    ]
    assert exit_status(sample.main, flags) == 0
    assert capsys.readouterr().out.endswith("-\nyes\n")


@pytest.mark.slow
def test_an_export_of_adapters_has_the_template_and_the_ends_of_turns(run, tmp_path):
    _, turn, end = ids_of(run)
    base = run.parent / "imported"
    flags = [
        *FLAGS.split(),
        "--config",
        f"{base}/config.toml",
        "--finetune",
        "--load",
        f"{base}",
        "--lora-rank",
        "2",
    ]
    flags += [
        "--data-path",
        f"{run.parent}/data",
        "--train-iters",
        "2",
        "--save",
        f"{tmp_path}/lora",
    ]
    run_ranks(on_rank, 1, flags)
    line = export_model(tmp_path / "lora", tmp_path / "out", None, None, 10**9, adapter=True)
    assert "the chat template of its conversations" in line
    assert transformers.AutoTokenizer.from_pretrained(
        tmp_path / "out"
    ).chat_template == template_of(run)
    ends = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert ends.eos_token_id == [turn, end]
    # The base's settings are the default, as the line says.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", generation_config=ends
    )
    assert model.generation_config.eos_token_id == [turn, end]
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out"
        ).generation_config.eos_token_id
        == end
    )


def test_a_run_answers_a_question_and_stops(run, capsys):
    flags = ["--load", str(run), "--temperature", "0", "--num-tokens", "20"]
    assert exit_status(sample.main, [*flags, "--chat", "--prompt", "5?"]) == 0
    assert capsys.readouterr().out.endswith("-\nyes\n")
    prompt = "<|im_start|>"  # spelled out it is text, which a question must not be
    assert exit_status(sample.main, [*flags, "--chat", "--prompt", prompt]) == 1
    assert "spells the special token" in capsys.readouterr().err
    assert exit_status(sample.main, [*flags, "--system", "Be brief."]) == 2
    assert "--system need --chat" in capsys.readouterr().err


def test_a_run_talks_on(run, capsys, monkeypatch):
    lines = iter(["5?", "", "<|im_end|>", "6?"])

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    flags = ["--load", str(run), "--chat", "--temperature", "0", "--num-tokens", "9"]
    assert exit_status(sample.main, flags) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == "yes"
    assert len(captured.out.splitlines()) == 2
    assert "spells the special token" in captured.err
