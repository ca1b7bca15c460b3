"""Run an entry's main on forked ranks, on the default data, and read its metrics."""

import io
import sys
from contextlib import redirect_stdout

import pretrain_dit
from pretrain_gpt import main
from runtime.ranks import run_ranks
from tools.common.training import PEAK
from train.callbacks.metrics import METRICS, read_metrics

TINY = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --seq-length 256
    --device cpu
    --global-batch-size 4 --micro-batch-size 1 --lr 1e-3 --lr-warmup-iters 1
    --eval-iters 1 --eval-interval 1000 --log-interval 1000
""".split()


def flags_of(data, *more):
    """Return the command line of the tiny model on a corpus with its tokenizer beside it."""
    return [*TINY, "--data-path", str(data), "--tokenizer-model", f"{data}.model", *more]


def on_rank(rank, world_size, arguments):
    """Run as a launcher would, but with a fixed peak for MFU.

    Its measurement takes longer than a step.

    Return the output: a rank's stdout belongs to the first test that started ranks, not to the
    running one.
    """
    with redirect_stdout(io.StringIO()) as output:
        try:
            main(arguments, PEAK)
        except BaseException:
            sys.stderr.write(output.getvalue())
            raise
    return output.getvalue()


DIT = """
    --latent-shape 1 8 8 --patch-size 2 --num-classes 10 --num-layers 4 --hidden-size 32
    --num-attention-heads 4
    --device cpu --global-batch-size 8 --micro-batch-size 2 --lr 1e-3 --eval-iters 1 --eval-interval
    1000
    --log-interval 1000 --ema-decay 0.9 --samples-per-class 0
""".split()


def dit_on_rank(rank, world_size, arguments):
    """Do the same as ``on_rank`` for a diffusion transformer."""
    pretrain_dit.main(arguments, PEAK)


def pretrain_digits(world_size, save, *arguments):
    """Train the tiny diffusion transformer into ``save`` and return its metrics.

    Its data are handwritten digits.
    """
    run_ranks(dit_on_rank, world_size, [*DIT, "--save", str(save), *arguments])
    return read_metrics(save / METRICS)


def pretrain(world_size, data, save, *arguments):
    """Train the tiny model on ``world_size`` ranks into ``save``, and return the metrics.

    The first rank's output is printed.
    """
    print(run_ranks(on_rank, world_size, flags_of(data, "--save", str(save), *arguments))[0])
    return read_metrics(save / METRICS)


def curve(save, *names):
    """Return these fields of each record of a run, None where it has one not."""
    return [[record.get(name) for name in names] for record in read_metrics(save / METRICS)]


def carried_on(ranks, save, arguments, *names, body=on_rank):
    """Train into ``save``, going on from what is there, and return fields of all records.

    The first rank's output is printed.
    """
    print(run_ranks(body, ranks, [*arguments, "--save", str(save), "--load", str(save)])[0])
    return curve(save, *names)


def differences(got, want):
    """Return the largest relative difference of loss and gradient norm over the iterations."""
    assert [record["iteration"] for record in got] == [record["iteration"] for record in want]
    return max(
        abs(a[name] - b[name]) / abs(b[name])
        for a, b in zip(got, want, strict=True)
        for name in ("lm_loss", "grad_norm")
    )
