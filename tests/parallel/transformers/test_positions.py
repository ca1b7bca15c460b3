"""Positions that models take by themselves.

The ranks have the same, and the check would see others.
"""

import pytest
import torch
import torch.distributed as dist

from parallel.comparison import Float64Mode
from parallel.transformers import shard
from parallel.transformers.batch import Positions, pack
from parallel.transformers.probe import TOKENS
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.transformers.families import (
    LENGTH,
    PACKED,
    averaged,
    difference,
    each_alone,
    tokens,
    transformers,
)

BEGINS = {
    "Roberta": 2,
    "XLMRoberta": 2,
    "XLMRobertaXL": 2,
    "Camembert": 2,
    "Data2VecText": 2,
    "RobertaPreLayerNorm": 2,
    "OPT": 0,
    "BioGpt": 0,
    "GPT2": 0,
    "GPTBigCode": 0,
    "Ernie": 0,
}
"""Classes whose positions are rows of a table, and the first of them."""
SHAPES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "ffn_dim": 32,
    "word_embed_proj_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "layerdrop": 0.0,
    "attn_pdrop": 0.0,
    "attention_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def model_of(kind):
    """A tiny decoder in float64, whose biases and positions are random too."""
    defaults = getattr(transformers, f"{kind}Config")()
    values = {name: value for name, value in SHAPES.items() if hasattr(defaults, name)}
    decoder = {} if kind in ("OPT", "GPT2", "GPTBigCode", "BioGpt") else {"is_decoder": True}
    config = getattr(transformers, f"{kind}Config")(**values, **decoder)
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    torch.manual_seed(1)
    model = getattr(transformers, kind + suffix)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return model.double().eval()


def compared(rank, world_size, kinds):
    """Errors of each class on the ranks, and whether its check is right.

    The third is its verdict with other positions.
    """
    results = {}
    for kind in kinds:
        with Float64Mode():
            model = model_of(kind)
            truth = each_alone(model, *tokens(LENGTH), PACKED)
            cp = shard(model, dist.group.WORLD)
            batch = cp.batch(*tokens(LENGTH), documents=PACKED)
            error = difference(averaged(cp.loss(model(**batch.inputs), batch), model), truth)
            right = cp.check(model, batch).right
            batch.inputs["position_ids"] = batch.inputs["position_ids"] + 1
            results[kind] = cp._positions.first, error, right, cp.check(model, batch).right
    return results


@pytest.mark.parametrize(
    "kinds", [("Roberta", "OPT", "GPT2"), pytest.param([*BEGINS], marks=pytest.mark.slow)]
)
def test_models_whose_positions_begin_elsewhere_train_as_without_position_ids(kinds):
    for kind, (first, error, right, wrong) in run_ranks(compared, 2, kinds)[0].items():
        assert first == BEGINS[kind], kind
        assert error < 1e-10, kind
        assert right, kind
        assert not wrong, kind


def test_given_positions_begin_at_0_or_where_the_models_own_do():
    model = model_of("Roberta")
    cp = shard(model)
    ids, labels = tokens(8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    expected = cp.batch(ids, labels, documents=(3, 5)).inputs["position_ids"]
    assert expected.tolist() == [[2, 3, 4, 2, 3, 4, 5, 6]]
    for position_ids in (positions, positions + 2):
        assert torch.equal(
            cp.batch(ids, labels, position_ids=position_ids).inputs["position_ids"], expected
        )
    with pytest.raises(
        UserError, match="begin a document at 5, but the model's own positions begin at 2"
    ):
        cp.batch(ids, labels, position_ids=positions + 5)


def test_a_token_that_such_a_model_does_not_count_is_refused_but_as_padding():
    model = model_of("Roberta")
    ids, labels = tokens(8)
    ids[0, 7] = 1
    cp = shard(model)
    with pytest.raises(UserError, match="input_ids contains the padding token 1"):
        cp.batch(ids, labels)
    mask = torch.ones_like(ids)
    mask[0, 7] = 0
    logits = cp.gather(model(**cp.batch(ids, labels, attention_mask=mask).inputs).logits)
    with cp.paused():
        expected = model(ids, attention_mask=mask).logits
    assert torch.allclose(logits[:, :7], expected[:, :7], atol=1e-10)


def test_positions_that_are_not_consecutive_are_refused():
    model = model_of("Roberta")
    scattered = (torch.arange(TOKENS) * 3 % TOKENS)[None]
    model.roberta.embeddings.create_position_ids_from_input_ids = lambda *inputs: scattered
    with pytest.raises(
        UserError,
        match="RobertaForCausalLM cannot be sharded: without position_ids its positions",
    ):
        shard(model)


MASKS = {
    "a hole": ([1, 1, 0, 1], False),
    "two holes": ([1, 0, 1, 0], False),
    "a hole after left padding": ([0, 1, 0, 1], False),
    "left padding": ([0, 0, 1, 1], True),
    "right padding": ([1, 1, 0, 0], True),
    "both": ([0, 1, 1, 0], True),
    "a row of padding alone": ([0, 0, 0, 0], True),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("with_positions", [False, True])
def test_padding_between_tokens_of_a_row_is_refused(name, with_positions):
    row, accepted = MASKS[name]
    ids = torch.arange(8).view(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], row])
    positions = torch.arange(4).expand(2, 4) if with_positions else None
    if accepted:
        whole = pack(ids, None, positions, None, mask)
        assert whole.tokens["input_ids"][0].tolist() == ids[mask.bool()].tolist()
    else:
        with pytest.raises(
            UserError, match="attention_mask has padding between the tokens of row 1"
        ):
            pack(ids, None, positions, None, mask)


def test_a_label_on_the_first_token_after_left_padding_has_no_loss_here():
    """transformers predicts it from the padding before it."""
    ids = torch.tensor([[5, 6, 7, 8]])
    mask = torch.tensor([[0, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, -100)
    assert pack(ids, labels, None, None, mask, Positions()).tokens["labels"].tolist() == [
        [7, 8, -100]
    ]
