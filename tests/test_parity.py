"""Training of every kind of model on any mesh equals training in one process.

It goes on from its checkpoints.
"""

import math
from functools import cache

import pytest

from kernels.attention import CAUSAL, FULL
from model.decoder import Decoder
from parallel.context import tiles
from parallel.mesh import distributed_mesh
from runtime.ranks import run_ranks
from tests.compositions import TRAINED
from tests.endings import apart
from tests.pretraining import differences, flags_of, on_rank, pretrain
from tests.starts import PATIENCE, ROOT
from tools.common.cases import case_of
from tools.common.training import PEAK, build_trainer
from train import trainer as training
from train.callbacks.metrics import METRICS, read_metrics
from train.config.language import parse_args

BOUND = 1e-5
CP1 = ("--context-parallel-size", "1")
ALONE = ("--context-parallel-method", "none")
SCORES = ("--attention-backend", "reference")


def config(kind, *more):
    return ("--config", str(ROOT / "configs" / "models" / f"{kind}_tiny.toml"), *more)


LINEAR = ("transnormer", "linear_transformer")
KINDS = {
    "llama": ((), ALONE),
    "gpt": (config("gpt"), (*CP1, *ALONE)),
    "gpt with a table of 251": (config("gpt", "--max-position-embeddings", "251"), (*CP1, *ALONE)),
    "gpt without a table": (
        config("gpt", "--max-position-embeddings", "none", "--position-embedding-type", "rope"),
        (*CP1, *ALONE),
    ),
    **{kind: (config(kind, "--num-query-groups", "none"), SCORES) for kind in LINEAR},
    "qwen3_5": (config("qwen3_5", "--softmax-every", "2"), (*CP1, *ALONE)),
    "smollm3": (config("smollm3"), (*CP1, *ALONE)),
    "granite": (config("granite3"), (*CP1, *ALONE)),
}
"""Flags of each kind, and of its reference.

The latter is one process, plain SDPA, or all scores of a linear attention at once.
"""


def rows():
    """Yield kinds, meshes and iterations.

    Three iterations see what twenty do, whose rounding has longer to grow.
    """
    for kind, case, slow in TRAINED:
        yield kind, case, 3, slow
        if kind == "llama" and not slow:
            yield kind, case, 20, True


def named(kind, case, iterations):
    return " ".join([kind, str(iterations), case.title.replace(" ", ""), *case.recompute.split()])


@pytest.fixture(scope="module")
def one_process(default_data, tmp_path_factory):
    """The reference of a kind, once for the same flags."""

    @cache
    def trained(kind, *flags):
        kind_flags, reference = KINDS[kind]
        return pretrain(
            1, default_data, tmp_path_factory.mktemp("one") / "run", *kind_flags, *flags, *reference
        )

    return trained


def each_on_rank(rank, world_size, runs):
    for name in apart(runs):
        on_rank(rank, world_size, runs[name])


@pytest.fixture(scope="module")
def records(default_data, tmp_path_factory):
    """The records of a run.

    All of as many ranks are trained in one go, the slow ones apart from the others.
    """

    @cache
    def trained(ranks, slow):
        folder, runs = tmp_path_factory.mktemp("runs"), {}
        for kind, case, iterations, is_slow in rows():
            if (case.ranks, is_slow) == (ranks, slow):
                save = folder / named(kind, case, iterations)
                joined = (
                    ("--micro-batch-size", "2") if ranks == case.cp * case.tp else ()
                )  # half of the collectives
                flags = (*KINDS[kind][0], "--train-iters", str(iterations), *joined, *case.flags)
                runs[save.name] = flags_of(default_data, "--save", str(save), *flags)
        run_ranks(each_on_rank, ranks, runs, timeout=3 * PATIENCE)
        return folder

    def read(kind, case, iterations, slow):
        return read_metrics(trained(case.ranks, slow) / named(kind, case, iterations) / METRICS)

    return read


@pytest.mark.parametrize(
    ("kind", "case", "iterations", "slow"),
    [
        pytest.param(*row, marks=pytest.mark.slow if row[-1] else (), id=named(*row[:-1]))
        for row in rows()
    ],
)
def test_every_iteration_and_the_validation_equal_one_process(
    kind, case, iterations, slow, records, one_process
):
    """Gradients are clipped, since their norm is above 1.

    Two key-value heads: on tp 4 each is shared by two ranks.
    """
    want = one_process(kind, "--train-iters", str(iterations))
    got = records(kind, case, iterations, slow)
    assert differences(got, want) <= BOUND
    assert got[-1]["validation_loss"] == pytest.approx(want[-1]["validation_loss"], rel=BOUND)
    assert want[0]["lm_loss"] > want[-1]["lm_loss"]


@pytest.mark.parametrize(
    ("kind", "method", "cp"),
    [
        ("gpt with a table of 251", "zigzag", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("llama", method, 4) for method in ("ring", "zigzag", "allgather", "striped")),
                ("gpt with a table of 251", "striped", 2),
                ("gpt with a table of 251", "zigzag", 4),
                ("gpt without a table", "zigzag", 4),
            )
        ),
    ],
)
def test_a_length_that_does_not_divide_is_padded_never_cut(
    kind, method, cp, default_data, one_process, tmp_path
):
    """Padding of a GPT reaches up to position 255 on four ranks, and its table ends at 250."""
    odd = ("--train-iters", "3", "--seq-length", "251")
    flags = (*KINDS[kind][0], *odd, "--micro-batch-size", "2", *case_of(f"cp={cp} {method}").flags)
    got = pretrain(cp, default_data, tmp_path / "run", *flags)
    assert differences(got, one_process(kind, *odd)) <= BOUND
    assert got[-1]["consumed_tokens"] == 3 * 4 * 251


def without_the_shift(rank, world_size, arguments):
    """Train with the diagonal kept in every round of striping.

    The later ranks' tokens must not be seen there.
    """
    tiles._compare = lambda rows, columns, shift, q0, k0: [
        (q0, q0 + rows, k0, k0 + columns, CAUSAL if shift < columns else FULL)
    ]
    on_rank(rank, world_size, arguments)


def positions_from_zero(rank, world_size, arguments):
    """Train with every rank's tokens numbered from 0.

    Right are their places in the whole sequence.
    """
    hidden = Decoder.hidden
    Decoder.hidden = lambda self, tokens, *_: hidden(self, tokens)
    on_rank(rank, world_size, arguments)


@pytest.mark.parametrize(
    ("kind", "wrong"), [("llama", without_the_shift), ("gpt", positions_from_zero)]
)
def test_a_wrong_mask_or_position_makes_parity_fail(
    kind, wrong, default_data, one_process, tmp_path, monkeypatch
):
    monkeypatch.setattr("tests.pretraining.run_ranks", lambda _, *args: run_ranks(wrong, *args))
    flags = ("--train-iters", "3")
    got = pretrain(
        2, default_data, tmp_path / "run", *KINDS[kind][0], *flags, *case_of("cp=2 striped").flags
    )
    monkeypatch.undo()
    assert differences(got, one_process(kind, *flags)) > 10 * BOUND


def train_with_an_overflow(rank, world_size, arguments):
    """Train, keys and values 1e25 times too large in iteration 3.

    Return the iterations skipped and all norms.
    """
    config = parse_args(arguments)
    with distributed_mesh(config.mesh) as mesh:
        trainer = build_trainer(config, mesh, PEAK)
        plain, reduce, norms = trainer.runner.forward_backward, training.reduce_and_clip, []
        weights = [
            p
            for name, p in trainer.runner.parameters().items()
            if name.endswith(("wk.weight", "wv.weight"))
        ]

        def forward_backward(micro_batches, valid):
            before = [weight.detach().clone() for weight in weights]
            if trainer.progress.iteration == 3:
                for weight in weights:
                    weight.detach().mul_(1e25)
            loss = plain(micro_batches, valid)
            for weight, good in zip(weights, before, strict=True):
                weight.detach().copy_(good)
            return loss

        def reduced(*args):
            loss, norm = reduce(*args)
            norms.append(norm)
            return loss, norm

        trainer.runner.forward_backward = forward_backward
        training.reduce_and_clip = reduced
        trainer.train()
    return trainer.progress.skipped_iterations, norms


@pytest.mark.parametrize("method", ["lasp", pytest.param("lasp2", marks=pytest.mark.slow)])
def test_an_overflow_is_a_skipped_step_on_all_ranks(method, default_data):
    def train(world_size, *more):
        arguments = flags_of(
            default_data,
            "--model-type",
            "transnormer",
            "--num-query-groups",
            "none",
            "--train-iters",
            "5",
            *more,
        )
        return run_ranks(train_with_an_overflow, world_size, arguments)

    ((skipped, want),) = train(1)
    assert skipped == 1
    assert [math.isfinite(norm) for norm in want] == [True, True, False, True, True]
    for skipped, norms in train(
        2, "--context-parallel-size", "2", "--context-parallel-method", method
    ):
        assert skipped == 1
        assert norms == pytest.approx(want, rel=BOUND, nan_ok=True)
