"""Every mesh writes what a forward over all tokens, without a cache, would."""

import dataclasses

import pytest
import torch

from kernels.cache import States
from model.generate import Draw
from model.registry import architecture_of, build_model
from parallel.context import ContextConfig
from parallel.mesh import MeshConfig
from runtime.errors import UserError
from runtime.ranks import run_ranks
from runtime.tensors import generator_of
from tests.model.models import as_family, model_config
from train.checkpoint.api import save_checkpoint
from train.config.entries import Config
from train.config.flags import write_toml
from train.generation import opened

LLAMA = model_config(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=61,
    init_method_std=0.2,
)
"""Its weights are so large that attention and logits are far from flat."""
LOCAL = {"window_size": "6,0", "window_attn_skip_freq": "[1,0,1]"}


def llama(model_type="llama", **changes):
    return as_family(LLAMA, model_type, **changes)


MODELS = {
    "llama": LLAMA,
    "gpt": llama(
        model_type="gpt",
        num_query_groups=None,
        position_embedding_type="learned_absolute",
        max_position_embeddings=41,  # as many as the longest text reads
        untie_embeddings_and_output_weights=False,
    ),
    "windows and sinks": llama(**LOCAL, softmax_type="learnable"),
    "gemma3": llama(
        **LOCAL,
        model_type="gemma3",
        query_pre_attn_scalar=5,
        rotary_base_local=90.0,
        untie_embeddings_and_output_weights=False,
    ),
    "smollm3": llama(model_type="smollm3", no_rope_freq="2"),
    "granite": llama(
        model_type="granite",
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=1.5,
    ),
    "adapters": llama(lora_rank=4, lora_alpha=2.0),
    "dynamic rope": llama(
        rope_scaling_type="dynamic",
        rope_scaling_factor=8.0,
        rope_scaling_original_max_position_embeddings=16,
    ),
}
STATES = {
    "qwen3_5": llama(
        model_type="qwen3_5",
        softmax_every=2,
        kv_channels=16,
        rotary_percent=0.5,
        linear_num_value_heads=8,
    ),
    "olmo_hybrid": llama(model_type="olmo_hybrid", softmax_every=2, linear_value_head_dim=10),
    "kda": llama(model_type="qwen3_5", softmax_every=2, linear_gate="per_channel", lora_rank=4),
    "transnormer": llama(model_type="transnormer", num_query_groups=None),
    "linear_transformer": llama(model_type="linear_transformer", num_query_groups=None),
    "hybrid": llama(model_type="transnormer", num_query_groups=None, softmax_every=2),
}
"""Models whose layers keep states."""
FOLDED = Config(
    model=STATES["hybrid"],
    mesh=MeshConfig(context_parallel_size=2),
    context=ContextConfig(context_parallel_method="lasp", context_parallel_layout="zigzag"),
)
"""A run whose states pass along two stretches a rank."""
NEW = 9
PROMPTS = [
    torch.randint(61, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (21, 5, 33)
]
MESHES = {
    f"cp 2, {method}": {"context_parallel_size": 2, "context_parallel_method": method}
    for method in ("ring", "striped", "zigzag", "ulysses", "exchange", "allgather")
} | {
    "cp 4": {"context_parallel_size": 4, "context_parallel_method": "zigzag"},
    "tp 2": {"tensor_model_parallel_size": 2},
    "pp 2": {"pipeline_model_parallel_size": 2},
    "cp 2, tp 2": {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
    "pp 2, tp 2": {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2},
    "pp 3, cp 2": {"pipeline_model_parallel_size": 3, "context_parallel_size": 2},
}


def size_of(mesh):
    sizes = [size for size in mesh.values() if isinstance(size, int)]
    return int(torch.tensor(sizes).prod())


def saved(folder, model, scale=1.0):
    """A run's folder, and its model in float64."""
    built_model = weighted(model)
    with torch.no_grad():
        built_model.embedding.weight.mul_(scale)
    (folder / "config.toml").write_text(write_toml(Config(model=model)))
    extra = {"imported_from": "elsewhere"}
    save_checkpoint(folder, 2, built_model, None, architecture=architecture_of(model), extra=extra)
    return built_model.double()


def weighted(config):
    """A model whose adapters, if it has any, are not 0."""
    model = build_model(config)
    model.init_weights(3)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(generator=generator_of(5, name))
    return model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a run of each model."""
    folders = {name: tmp_path_factory.mktemp("run") for name in MODELS | STATES}
    for name, model in (MODELS | STATES).items():
        saved(folders[name], model)
    folded = folders["folded hybrid"] = tmp_path_factory.mktemp("run")
    saved(folded, FOLDED.model)
    (folded / "config.toml").write_text(write_toml(FOLDED))
    return folders


def naive(config, prompts):
    """The likeliest tokens and their logits [NEW, B, V], each from a forward over all tokens."""
    if config.rope is not None and config.rope.rope_scaling_type == "dynamic":
        config = dataclasses.replace(config, rope_scaling_seq_length=max(map(len, prompts)) + NEW)
    model, continuations = weighted(config), []
    model.cast(torch.float64)
    for prompt in prompts:
        tokens, logits = list(prompt), []
        for _ in range(NEW):
            logits.append(model(torch.tensor([tokens]))[0, -1].detach())
            tokens.append(int(logits[-1].argmax()))
        continuations.append((tokens[len(prompt) :], torch.stack(logits)))
    return [text for text, _ in continuations], torch.stack(
        [logits for _, logits in continuations], 1
    )


def written(rank, world_size, folder, mesh, lost=False, **settings):
    """The text of a rank, with the logits that it draws from.

    With ``lost``, it has one row of a cache less.
    """
    logits_seen, draw = [], Draw.__call__

    def recorded(self, hidden, logits):
        logits_seen.append(logits)
        return draw(self, hidden, logits)

    Draw.__call__ = recorded
    try:
        with opened(folder, dtype=torch.float64, **mesh) as writer:
            if lost:
                lose_a_row(writer)
            return writer.write(PROMPTS, NEW, **settings), torch.stack(
                logits_seen
            ) if logits_seen else None
    finally:
        Draw.__call__ = draw


def lose_a_row(writer):
    """Let the first rank of context parallelism hide one row of a layer after the prompts."""
    through = writer._through_stages

    def losing(tokens, positions, ends, states):
        cache = states.layers[1]
        assert (
            cache is None or len(cache) < 33 / writer._mesh.cp.size() + NEW + 1
        )  # each rank keeps a share
        if cache is not None and writer._mesh.cp.get_local_rank() == 0:
            cache._parts[0][2][:, 1] = 1 << 62
        return through(tokens, positions, ends, states)

    writer._through_stages = losing


def of_ranks(results):
    """The texts of all ranks, and the logits of the one that drew."""
    texts = [text for text, _ in results]
    assert all(text == texts[0] for text in texts)
    (logits,) = (logits for _, logits in results if logits is not None)
    return texts[0], logits


@pytest.mark.parametrize("name", MODELS)
def test_one_process_writes_what_no_cache_does(name, runs):
    texts, logits = of_ranks([written(0, 1, runs[name], {})])
    expected_texts, expected = naive(MODELS[name], PROMPTS)
    assert texts == expected_texts
    assert (logits - expected).abs().max() < 1e-10
    _, lost = of_ranks([written(0, 1, runs[name], {}, lost=True)])  # negative control
    assert torch.equal(lost[0], logits[0])
    assert (lost[1] - expected[1]).abs().max() > 1e-4


CP = "context_parallel_size"
OWN = {"cp 2": {CP: 2}, "tp 2": MESHES["tp 2"], "pp 2": MESHES["pp 2"]}
"""Meshes of 2 ranks whose method is the model's own, zigzag or lasp."""
CELLS = {
    2: [
        ("gpt", OWN["pp 2"]),
        *((name, OWN["cp 2"]) for name in ("kda", "olmo_hybrid", "linear_transformer", "hybrid")),
        ("qwen3_5", OWN["tp 2"]),
        ("hybrid", OWN["pp 2"]),
        ("qwen3_5", MESHES["cp 2, ulysses"]),
        ("folded hybrid", {CP: 2}),
    ],
}
"""Models and meshes by the number of ranks."""
FEW_METHODS = [
    ("qwen3_5", "ring"),
    ("qwen3_5", "exchange"),
    ("transnormer", "ulysses"),
    ("hybrid", "ulysses"),
]
SLOW = {
    ranks: [(name, mesh) for name in MODELS for mesh in MESHES.values() if size_of(mesh) == ranks]
    for ranks in (2, 4)
}
SLOW[2] += [(name, mesh) for name in STATES for mesh in OWN.values()]
SLOW[2] += [
    (name, {CP: 2, "context_parallel_method": method})
    for name, method in (*FEW_METHODS, ("hybrid", "lasp2"))
]
SLOW[4] += [(name, {CP: 4}) for name in STATES]
SLOW[4] += [(name, {CP: 2, **MESHES[mesh]}) for name in STATES for mesh in ("tp 2", "pp 2")]
SLOW[6] = [(name, {CP: 3, **MESHES["tp 2"]}) for name in ("kda", "hybrid")]
SLOW[6] += [(name, MESHES["pp 3, cp 2"]) for name in MODELS]


def all_written(rank, world_size, cells, folders, fault=None):
    """The texts of a rank in each cell; ``fault`` breaks something first."""
    if fault:
        fault()
    return [written(rank, world_size, folders[name], mesh) for name, mesh in cells]


def away(name, results):
    """The largest difference of logits from those of a forward over all tokens.

    True stands beside it if texts are the same.
    """
    model = (MODELS | STATES)[name.removeprefix("folded ")]
    texts, logits = of_ranks(results)
    expected_texts, expected = naive(model, PROMPTS)
    assert expected.std() > 0.1
    if model.recurrent:  # lengths are read one by one
        order = sorted(range(len(PROMPTS)), key=lambda number: len(PROMPTS[number]))
        logits, expected = logits.view(len(PROMPTS), NEW, -1), expected[:, order].transpose(0, 1)
    return (logits - expected).abs().max().item(), texts == expected_texts


@pytest.mark.parametrize(
    ("ranks", "cells"),
    [*CELLS.items(), *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW.items())],
    ids=lambda value: value if isinstance(value, int) else len(value),
)
def test_a_mesh_writes_what_no_cache_does(ranks, cells, runs):
    """States go on from prompts that ranks share."""
    results = run_ranks(all_written, ranks, cells, runs)
    for (name, mesh), cell in zip(cells, zip(*results, strict=True), strict=True):
        error, same = away(name, cell)
        assert error < 1e-10, (name, mesh)
        assert same


def without_the_sum():
    """Each rank goes on from the state of its own tokens."""
    States.total = lambda self, x: x


def with_padding():
    """Padding that tensor parallelism adds to a token changes the states."""
    States.count = property(lambda self: self._positions.shape[1], lambda self, value: None)


@pytest.mark.parametrize(("fault", "mesh"), [(without_the_sum, "cp 2"), (with_padding, "tp 2")])
def test_a_state_that_is_not_of_all_tokens_shows(fault, mesh, runs):
    kinds = [("olmo_hybrid", OWN[mesh]), ("transnormer", OWN[mesh])]
    results = run_ranks(unequal, 2, kinds, runs, fault)
    for (name, _), logits in zip(kinds, results[0], strict=True):
        _, expected = naive(STATES[name], PROMPTS[1:2])
        assert (logits[0] - expected[0, 0]).abs().max() < 1e-10  # the prompt's
        assert (logits[1] - expected[1, 0]).abs().max() > 1e-4


def unequal(rank, world_size, cells, folders, fault):
    """The logits of a prompt of five tokens, whose text may differ between ranks."""
    fault()
    logits_by_rank, draw = [], Draw.__call__
    for name, mesh in cells:
        logits_seen = []
        Draw.__call__ = lambda self, hidden, logits, logits_seen=logits_seen: (
            logits_seen.append(logits),
            draw(self, hidden, logits),
        )[1]
        with opened(folders[name], dtype=torch.float64, **mesh) as writer:
            writer.write(PROMPTS[1:2], 2)
        logits_by_rank.append([logits[0] for logits in logits_seen])
    return logits_by_rank


def drawn(rank, world_size, folder, mesh):
    """Texts of two prompts drawn by two seeds, one of them twice.

    The last ones are ended by a token of the first.
    """
    settings = {"temperature": 3.0, "top_k": 40, "top_p": 0.95}
    with opened(folder, dtype=torch.float64, **mesh) as writer:
        first, other, again = (
            writer.write(PROMPTS[:2], NEW, seed=seed, **settings) for seed in (1, 2, 1)
        )
        ended = writer.write(PROMPTS[:2], NEW, seed=1, stop=[first[0][3]], **settings)
        return [first, other, again, ended]


@pytest.mark.slow
def test_every_rank_draws_what_one_process_does(runs):
    first, other, again, ended = drawn(0, 1, runs["llama"], {})
    assert first == again != other
    assert ended[0] == first[0][: first[0].index(first[0][3])]
    for mesh in ("cp 2, zigzag", "cp 2, tp 2", "pp 2, tp 2"):
        results = run_ranks(drawn, size_of(MESHES[mesh]), runs["llama"], MESHES[mesh])
        assert results == [[first, other, again, ended]] * size_of(MESHES[mesh]), mesh


def refused(rank, world_size, folder, mesh):
    with pytest.raises(UserError) as error, opened(folder, **mesh) as writer:
        writer.write([[1, 2]], 3)
    return str(error.value)


@pytest.mark.slow
def test_a_model_that_overflows_is_named_on_all_ranks(tmp_path):
    saved(tmp_path, LLAMA, scale=float("nan"))
    messages = run_ranks(refused, 2, tmp_path, MESHES["pp 2"])
    message = "the logits of the next token are not finite; use an earlier checkpoint"
    assert messages == [message] * 2


def test_what_cannot_be_written_is_refused(runs, tmp_path):
    def message(folder=runs["gpt"], **mesh):
        return refused(0, 1, folder, mesh)

    assert "has no config.toml" in message(tmp_path)
    assert "does not fit 1 started processes" in message(context_parallel_size=2)
    (tmp_path / "config.toml").write_text(write_toml(Config(model=LLAMA)))
    assert "holds no checkpoint" in message(tmp_path)
    assert "lasp, which passes states of linear attention on" in message(
        tmp_path, context_parallel_method="lasp"
    )
    with opened(
        runs["gpt"], context_parallel_method="auto"
    ) as writer:  # one process has nothing to choose
        for prompts, refusal_text in (
            ([[1, 61]], "token 61, but the model has only tokens 0 to 60"),
            ([[1], []], "prompt 2 has no tokens"),
            ([[1] * 34], "max_position_embeddings 41 allows only 42"),
        ):
            with pytest.raises(UserError, match=refusal_text):
                writer.write(prompts, NEW)
