"""Packed conversations train as each does alone, with loss on the assistant's tokens alone.

They do so on one rank and several.
"""

import dataclasses
import json
import random

import pytest
import torch

from data.chat.convert import Chat
from data.chat.template import load_template
from data.loader import IGNORE_INDEX
from data.text.prepare import Request, prepare
from data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from kernels.loss import cross_entropy_sum
from model.registry import build_model
from tests.data.chat.templates import TEMPLATES, write_tokenizer
from tests.packed import LOSS, TINY, Step, as_it_is, assert_equal, over_ranks
from tests.parallel.tiny import gradients_of
from tests.test_packed import second_document_alone
from train.config.language import parse_args

LENGTH = 131
CP, METHODS = "--context-parallel-size {} --context-parallel-method {}", ("striped", "zigzag")


@dataclasses.dataclass
class Chats:
    """Conversations, and the flags that train one step on all of them."""

    turns: list[list[dict[str, str]]]
    flags: list[str]
    tokenizer: str


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("chats"), random.Random(3)
    tokenizer = write_tokenizer(folder / "tokenizer", TEMPLATES["llama 3"])
    turns = []
    for _ in range(9):
        texts = [
            "".join(draw.choices("abc xyz", k=draw.randint(2, 9))).strip() + "."
            for _ in range(draw.choice((2, 4)))
        ]
        turns.append(
            [
                {"role": ("user", "assistant")[i % 2], "content": text}
                for i, text in enumerate(texts)
            ]
        )
    (folder / "in.jsonl").write_text(
        "".join(json.dumps({"messages": conversation}) + "\n" for conversation in turns)
    )
    request = Request(
        inputs=(str(folder / "in.jsonl"),),
        vocab_size=None,
        tokenizer_model=tokenizer,
        chat=Chat(seq_length=LENGTH),
    )
    counts = prepare(request, folder / "chats", progress=False)[0].conversations
    assert 3 <= counts["samples"] < 9  # some hold several
    flags = f"""
        --data-path {folder}/chats --tokenizer-model {tokenizer} --sft --split 100,0,0
        --eval-iters 0 --seq-length {LENGTH} --global-batch-size {counts["samples"]}
        --micro-batch-size 1
    """.split()
    return Chats(turns, flags, tokenizer)


def alone(chats):
    """The token-weighted mean over the conversations, in float64.

    Each is computed by itself from its turns.
    """
    config, tokenizer = parse_args([*TINY, *chats.flags]), load_tokenizer(chats.tokenizer)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    template = load_template(chats.tokenizer)
    model = build_model(dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size))
    model.init_weights(config.train.seed)
    model.double()
    losses, valid = [], 0
    for turns in chats.turns:
        ids, learned = map(torch.from_numpy, template.tokenize(tokenizer, turns))
        labels = ids[1:].where(learned[1:], IGNORE_INDEX)
        losses.append(cross_entropy_sum(model(ids[None, :-1]), labels[None], IGNORE_INDEX)[0])
        valid += int(learned[1:].sum())
    loss = torch.stack(losses).sum() / valid
    loss.backward()
    return Step(loss.item(), gradients_of(model), valid)


def others_changed(batch):
    """Leave loss to the second conversation of the row alone; change every token of the others."""
    batch = second_document_alone(batch)
    mine = batch["starts"].cumsum(1) == 2
    return batch | {"tokens": batch["tokens"].where(mine, (batch["tokens"] + 7) % 200)}


def edges_ignored(batch):
    """Take a sample for one conversation."""
    starts = torch.zeros_like(batch["starts"])
    starts[:, 0] = True
    return batch | {"starts": starts}


def all_learned(batch):
    """Ignore the loss mask."""
    return batch | {"labels": batch["tokens"].roll(-1, 1)}


@pytest.fixture(scope="module")
def want(chats):
    return alone(chats)


@pytest.mark.parametrize(
    ("ranks", "methods"),
    [(1, ["striped"]), (2, ["exchange"]), pytest.param(2, METHODS, marks=pytest.mark.slow)],
)
def test_a_step_is_that_of_its_conversations_alone_whatever_others_hold(
    ranks, methods, chats, want
):
    wrong = (all_learned, edges_ignored) * (ranks == 1)
    changes = (as_it_is, second_document_alone, others_changed, *wrong)
    runs = [[*chats.flags, *CP.format(ranks, method).split()] for method in methods]
    for got, unchanged, changed, *controls in over_ranks(ranks, runs, changes):
        assert_equal(got, want)
        assert unchanged.loss > 0
        assert unchanged.equal(changed)
        assert all(abs(control.loss - want.loss) > 10 * LOSS * want.loss for control in controls)
