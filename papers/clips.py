"""Predicted steps of Wan on clips, for configurations whose results were published elsewhere.

python -m papers.clips

The predictions are for the blocks of diffusers, which torch runs operator by operator, as
parallel.diffusers does. Other programs ran the published steps, some with fused kernels, which keep
and move fewer bytes. Their results are not in this file: the predictions were written down first
(docs/concepts/predictions.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel.context.config import FullContextConfig
from parallel.context.methods import SoftmaxMethodName
from planner.cluster import load_cluster
from planner.diffusion.clip import Clip, load_transformer
from planner.diffusion.run import ClipRun
from planner.diffusion.step import ClipPrediction, predict_clip
from runtime.progress import duration
from tools.common.arguments import parser_for, run_command

WAN_CLIP = Clip(frames=93, height=480, width=832)
"""Clip of 24 x 30 x 52 = 37,440 tokens."""
BLOCKS_OF_14B = 40
BLOCKS_OF_1B = 30
CLIPS_OF_1B = {
    16384: Clip(frames=61, height=512, width=512),
    1024: Clip(frames=1, height=512, width=512),
}


@dataclass(frozen=True)
class Row:
    """A configuration, with its published settings, and those that had to be assumed, in words."""

    name: str
    published: str
    assumed: str
    run: ClipRun
    cluster: str = "h100"
    model: str = "wan2.1_14b"
    clip: Clip = WAN_CLIP
    is_timed: bool = True
    """False if only the memory is of interest."""

    def prediction(self) -> ClipPrediction:
        """Predict the time and memory of a step."""
        model, _ = load_transformer(self.model)
        return predict_clip(model, self.clip, self.run, load_cluster(self.cluster))


def full(name: SoftmaxMethodName) -> FullContextConfig:
    """Return the configuration of a method for full attention, in the contiguous layout."""
    return FullContextConfig(context_parallel_method=name, context_parallel_layout="contiguous")


def rows_of_14b() -> Iterator[Row]:
    """Yield the steps that train all weights of Wan 2.1 14B."""
    in_two = ClipRun(gpus=32, context=2, batch=64, method=full("ring"))
    yield Row(
        "A1",
        "128 H100, batch 128, TP 2, CP 4, DP 16, 8 of 40 layers recomputed",
        "ring; optimizer sharded (zero1)",
        ClipRun(
            gpus=128,
            context=4,
            tp=2,
            batch=128,
            strategy="zero1",
            recomputed=8,
            method=full("ring"),
        ),
    )
    sharded = "32 {}, batch 64, CP 2, fully sharded, nothing recomputed"
    yield Row("A2", sharded.format("B200"), "ring", in_two, "b200")
    yield Row("A3", sharded.format("GB200"), "ring", in_two, "gb200")
    yield Row(
        "A4",
        "32 GB300, CP 2, DDP",
        "ring; batch 64, nothing recomputed",
        replace(in_two, strategy="ddp"),
        "gb300",
    )
    for name, gpus in (("A5", 8), ("A6", 64)):
        yield Row(
            name,
            f"{gpus} H100, FSDP2, a clip on each",
            f"batch {gpus}, all recomputed",
            ClipRun(gpus=gpus, batch=gpus, recomputed=BLOCKS_OF_14B, method=full("ring")),
        )


def rows_of_1b() -> Iterator[Row]:
    """Yield the steps of Wan 2.1 1.3B in float32; only their memory is of interest."""
    for tokens, clip in CLIPS_OF_1B.items():
        for context in (1, 2, 4):
            for recomputed, words in ((0, "nothing recomputed"), (BLOCKS_OF_1B, "all recomputed")):
                yield Row(
                    "A7",
                    f"1.3B in float32, 8 H100, FSDP2, Ulysses {context}, {tokens:,} tokens",
                    f"{words}, one clip a group",
                    ClipRun(
                        gpus=8,
                        context=context,
                        batch=8 // context,
                        recomputed=recomputed,
                        element_size=4,
                        method=full("ulysses"),
                    ),
                    model="wan2.1_1.3b",
                    clip=clip,
                    is_timed=False,
                )


def rows() -> Iterator[Row]:
    """Yield the configurations of all rows."""
    yield from rows_of_14b()
    yield from rows_of_1b()
    yield Row(
        "A8",
        "LoRA of rank 64, 14B image-to-video, 32,760 tokens, 1 H200, checkpointing",
        "adapters of the attention's projections, in bfloat16",
        ClipRun(
            gpus=1,
            strategy="ddp",
            recomputed=BLOCKS_OF_14B,
            lora_rank=64,
            method=full("ring"),
        ),
        cluster="h200",
        model="wan2.1_i2v_14b",
        clip=Clip(frames=81, height=480, width=832),
    )


def lines_of(row: Row) -> Iterator[str]:
    """Yield the cells of a row of the table, in the order of the columns in ``main``."""
    prediction = row.prediction()
    yield row.name
    yield row.published
    yield row.assumed
    gpus = row.run.gpus
    cluster = load_cluster(row.cluster)
    if row.is_timed:
        yield duration(prediction.time)
        yield duration(prediction.forward)
        rate = prediction.tflops(gpus)
        yield f"{rate:.0f} ({rate / cluster.peak_tflops:.0%})"
        spent = []
        for cause, seconds in sorted(prediction.seconds.items(), key=lambda item: -item[1]):
            if seconds > 0.01 * prediction.time:
                spent.append(f"{cause} {seconds / prediction.time:.0%}")
        yield f"{', '.join(spent)} ({prediction.pointwise / prediction.time:.0%} between products)"
    else:
        yield from ("", "", "", "")
    amounts = [f"{count / 1e9:.1f}" for count in prediction.memory.values()]
    total = f"{prediction.bytes / 1e9:.1f}"
    if prediction.bytes > 1e9 * cluster.memory_gb:
        total += f", more than the card's {cluster.memory_gb:g}"
    yield f"{total}: {' + '.join(amounts)}"


def main() -> int:
    """Print a table of all configurations with their predictions."""
    parser_for("python -m papers.clips", __doc__).parse_args()
    heads = (
        "row",
        "published setting",
        "assumed",
        "step",
        "its forwards",
        "TFLOP/s a GPU",
        "of the step",
        "GB per GPU: weights, gradients and optimizer + activations + block or loss",
    )
    print(f"| {' | '.join(heads)} |")
    print("|" + " --- |" * len(heads))
    for row in rows():
        print(f"| {' | '.join(lines_of(row))} |")
    return 0


if __name__ == "__main__":
    run_command(main)
