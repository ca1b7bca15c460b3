r"""Plan the training of a diffusion transformer of diffusers on clips that ranks share.

python -m tools.plan_clip wan2.1_14b --frames 81 --height 480 --width 832 --gpus 8 --cluster h100
python -m tools.plan_clip wan2.1_14b --frames 81 --height 720 --width 1280 --gpus 8 --lora 64
python -m tools.plan_clip models/Wan2.2-TI2V-5B --frames 121 --height 704 --width 1280 --fits
python -m tools.plan_clip flux_dev --height 1024 --width 1024 --gpus 8 --context 2 --method ulysses

The first argument is a transformer's config.json, its folder or its pipeline's, or a name of
configs/diffusers. Every number of ranks that share a clip and every method of parallel.diffusers is
predicted, with and without gradient checkpointing. Clips and texts are encoded before training.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the packages are one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels.backends import RATED
from parallel.context.config import FullContextConfig
from parallel.context.methods import method_of
from planner.cluster import Cluster, load_cluster
from planner.diffusion.clip import Clip, load_transformer
from planner.diffusion.run import LORA_TARGETS, ClipRun, clip_flops, whole_traces
from planner.diffusion.search import (
    Choices,
    ClipCandidate,
    ClipRanking,
    contexts_of,
    full_methods,
    largest_clips,
    rank_clip,
)
from planner.diffusion.transformer import Grid, Transformer
from planner.dry_run import tightly
from planner.levers import title_of
from runtime.errors import UserError, at_least
from runtime.progress import counted, duration
from tools.common.arguments import parser_for, run_command
from tools.common.plan_text import WIDTH, bars, equal_to_first, grouped
from tools.common.report import aligned
from train.run import exit_status

DEFAULT_FRAMES = 81
SIZES = {"bfloat16": 2, "float32": 4}
"""Bytes per element, keyed by dtype."""


def build_parser() -> argparse.ArgumentParser:
    """Define the command line of ``python -m tools.plan_clip``."""
    parser = parser_for("python -m tools.plan_clip", __doc__)
    add = parser.add_argument
    add("model", help="a config.json or its folder, or a name of configs/diffusers")
    add("--frames", type=int, help=f"frames (default: {DEFAULT_FRAMES}, or 1 for pictures)")
    add("--height", type=int, default=480, help="height of a clip in pixels (default: %(default)s)")
    add("--width", type=int, default=832, help="width of a clip in pixels (default: %(default)s)")
    add("--text-tokens", type=int, metavar="N", help="text tokens (default: the pipeline's number)")
    add(
        "--vae",
        type=int,
        nargs=3,
        metavar=("T", "H", "W"),
        help="pixels per latent along frames, height and width (default: the published model's)",
    )
    add(
        "--time-per-token",
        action="store_true",
        help="timesteps differ within a clip, as in image-to-video training of Wan 2.2 TI2V-5B",
    )
    add("--gpus", type=int, default=8, help="(default: %(default)s)")
    add("--cluster", default="h100", help="a file, or a name such as h200 (default: %(default)s)")
    add("--batch", type=int, metavar="N", help="clips per step on all GPUs (default: one per GPU)")
    add("--micro-batch", type=int, default=1, metavar="N", help="clips per micro-batch (default 1)")
    add("--context", type=int, metavar="N", help="GPUs that share a clip (default: try all)")
    add("--method", default="auto", help="method: auto, or one of " + ", ".join(full_methods()))
    add("--lora", type=int, metavar="RANK", help="train LoRA adapters (default: all weights)")
    add(
        "--lora-targets",
        nargs="+",
        default=LORA_TARGETS,
        metavar="NAME",
        help=f"modules with adapters, as peft takes them (default: {' '.join(LORA_TARGETS)})",
    )
    sharding = parser.add_mutually_exclusive_group().add_argument
    sharding("--fsdp", action="store_true", help="shard weights over all GPUs (the default)")
    sharding("--ddp", action="store_true", help="keep whole weights on every GPU")
    add("--checkpointing", choices=("auto", "full", "none"), default="auto", help="auto: plan both")
    add("--dtype", choices=tuple(SIZES), default="bfloat16", help="(default: %(default)s)")
    add("--fits", action="store_true", help="print the largest clip that fits")
    add("--top", type=int, default=10, metavar="N", help="rows to show (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of the table")
    return parser


def base_run(args: argparse.Namespace) -> ClipRun:
    """Return the run whose division over ranks is to be searched."""
    return ClipRun(
        gpus=args.gpus,
        batch=args.batch or args.gpus,
        samples=args.micro_batch,
        strategy="ddp" if args.ddp or args.gpus == 1 else "zero3",
        element_size=SIZES[args.dtype],
        lora_rank=args.lora,
        lora_targets=tuple(args.lora_targets),
    )


def choices_of(args: argparse.Namespace, model: Transformer) -> Choices:
    """Return the values to try. Raises UserError if a flag does not suit the GPUs or the model."""
    contexts = contexts_of(args.gpus)
    if args.context is not None:
        if args.context not in contexts:
            raise UserError(
                f"context is {args.context}, which does not divide the {args.gpus} GPUs; use one "
                f"of {', '.join(map(str, contexts))}"
            )
        contexts = (args.context,)
    methods = full_methods()
    if args.method != "auto":
        method_of(args.method)
        if args.method not in methods:
            raise UserError(
                f"method is {args.method}, which these models do not use; use auto or one of "
                f"{', '.join(methods)}"
            )
        methods = (args.method,)
    recomputed = {"auto": (0, model.num_blocks), "full": (model.num_blocks,), "none": (0,)}
    return Choices(contexts, methods, recomputed[args.checkpointing])


def plan(argv: list[str]) -> None:
    """Rank the ways to train a model on clips, or find the largest clip; print the result."""
    args = build_parser().parse_args(argv)
    at_least(args, 1, "gpus", "batch", "micro_batch", "context", "lora", "top")
    model, file = load_transformer(args.model)
    frames = args.frames or (1 if model.makes_pictures else DEFAULT_FRAMES)
    clip = Clip(
        frames=frames,
        height=args.height,
        width=args.width,
        text=args.text_tokens,
        vae=Grid(*args.vae) if args.vae else None,
        has_time_per_token=args.time_per_token,
    )
    if clip.has_time_per_token and model.joint:
        raise UserError(
            f"time_per_token is set, but {model.config_class} has one timestep per sample; leave "
            "out --time-per-token"
        )
    cluster = load_cluster(args.cluster)
    run = base_run(args)
    choices = choices_of(args, model)
    name = file.stem if file.stem != "config" else str(file)
    if args.fits:
        print_largest(args, model, clip, run, name, cluster, choices)
        return

    ranking = rank_clip(model, clip, run, cluster, choices)
    if not ranking.candidates:
        raise UserError(nothing_fits(ranking, cluster, run, choices))
    if args.json:
        rows = [entry(candidate) for candidate in ranking.candidates[: args.top]]
        print(json.dumps({"cluster": cluster.entries(), "rows": rows}))
        return
    print("\n".join(answer(ranking, model, clip, name, cluster, args.top)))


def nothing_fits(ranking: ClipRanking, cluster: Cluster, run: ClipRun, choices: Choices) -> str:
    """Explain why there is no candidate, and what to do."""
    if not ranking.over_memory:
        return f"no method suits: {next(iter(ranking.refused))}"
    remedies = ["more GPUs"]
    if run.strategy == "ddp" and run.gpus > 1:
        remedies.append("--fsdp")
    if run.lora_rank is None:
        remedies.append("--lora RANK")
    if not max(choices.recomputed):
        remedies.append("--checkpointing full")
    return (
        f"memory_gb of {cluster.name} is {cluster.memory_gb:g}, but the smallest of "
        f"{len(ranking.over_memory)} tried takes {min(ranking.over_memory) / 1e9:.1f}; use "
        f"{', '.join(remedies)} or a smaller clip (--fits says which)"
    )


def entry(candidate: ClipCandidate) -> dict[str, Any]:
    """Return a candidate as --json writes it."""
    run, prediction = candidate
    return {
        "run": asdict(run),
        "predicted_seconds": prediction.time,
        "predicted_seconds_by_part": prediction.seconds,
        "predicted_forward_seconds": prediction.forward,
        "predicted_pointwise_seconds": prediction.pointwise,
        "flops": prediction.flops,
        "tflops_per_gpu": prediction.tflops(run.gpus),
        "memory_bytes": prediction.bytes,
        "memory_bytes_by_part": prediction.memory,
        "attention_bytes_inside_nodes": prediction.links.inside,
        "attention_bytes_between_nodes": prediction.links.between,
    }


def headline(model: Transformer, clip: Clip, run: ClipRun, name: str, cluster: Cluster) -> str:
    """Return a plan's heading: the GPUs, the clip with its tokens, and the model."""
    grid = " x ".join(map(str, clip.grid(model)))
    text = f"{clip.text_tokens(model):,} of text that every GPU has"
    if model.joint:
        text = f"with {clip.text_tokens(model):,} of text: {clip.attended_tokens(model):,}"
    shape = f"clips of {clip.frames} x {clip.height} x {clip.width}"
    if model.makes_pictures:
        shape = f"pictures of {clip.height} x {clip.width}"
    lines = [
        f"{counted(run.gpus, 'GPU')} of {cluster.name}, {shape}: "
        f"{grid} = {clip.image_tokens(model):,} tokens, {text}"
    ]
    training = run.training()
    traces = whole_traces(model, clip, training)
    trained = "all trained"
    if run.lora_rank is not None:
        trained = f"{traces.trained / 1e6:,.1f} M of them trained, in adapters of {run.lora_rank}"
    forward, backward = clip_flops(model, clip, training)
    lines.append(
        f"{name}, {model.config_class}: "
        f"{traces.parameters / 1e9:.2f} B weights, {trained}; {forward + backward:.3g} FLOPs a "
        f"clip, {counted(run.batch, 'clip')} a step"
    )
    return "\n".join(lines)


def answer(
    ranking: ClipRanking, model: Transformer, clip: Clip, name: str, cluster: Cluster, top: int
) -> list[str]:
    """Describe the fastest run that fits, then the others."""
    run, prediction = ranking.candidates[0]
    slowest_first = sorted(prediction.seconds.items(), key=lambda item: -item[1])
    spent = []
    for cause, seconds in slowest_first:
        if seconds > 0.005 * prediction.time:
            spent.append(f"{cause} {duration(seconds)}")
    owner = f"a GPU of the first row{tightly(prediction.bytes, cluster)}"
    shown = ranking.candidates[:top]
    return [
        headline(model, clip, run, name, cluster),
        *discarded(ranking, cluster, top),
        table(shown, cluster),
        *equal_to_first([candidate.prediction.time for candidate in shown]),
        f"row 1: {', '.join(spent)}",
        f"       forwards take {duration(prediction.forward)}; norms, gates and casts take "
        f"{duration(prediction.pointwise)}",
        bars(prediction.memory, 0.0, cluster, owner),
        f"in the training script: cp = {call_of(run)}",
        *sources(run, cluster),
    ]


def discarded(ranking: ClipRanking, cluster: Cluster, top: int) -> list[str]:
    """Return lines on the candidates, and on the number discarded for each reason."""
    count = len(ranking.candidates)
    shown = f", of which the best {top} are shown (--top)" if top < count else ""
    lines = [
        f"{counted(count, 'candidate')}{shown}; {ranking.refused.total()} refused, "
        f"{len(ranking.over_memory)} too large"
    ]
    for example, number in grouped(ranking.refused):
        text = f"refused {number}{example}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
    if ranking.over_memory:
        lines.append(
            f"  too large {len(ranking.over_memory)}: memory is {cluster.memory_gb:g} GB, but "
            f"these take {min(ranking.over_memory) / 1e9:.1f} or more"
        )
    return lines


def _memory_by(run: ClipRun) -> str:
    words = ["whole weights" if run.strategy == "ddp" else "sharded weights"]
    if run.recomputed:
        words.append("checkpointing")
    return ", ".join(words)


Column = Callable[[ClipCandidate, Cluster], str]
COLUMNS: dict[str, Column] = {
    "method": lambda row, _: title_of(row.run.method) if row.run.context > 1 else "alone",
    "memory by": lambda row, _: _memory_by(row.run),
    "GPUs a clip": lambda row, _: str(row.run.context),
    "a step": lambda row, _: duration(row.prediction.time),
    "TFLOP/s": lambda row, _: f"{row.prediction.tflops(row.run.gpus):.0f}",
    "of peak": lambda row, cluster: (
        f"{row.prediction.tflops(row.run.gpus) / cluster.peak_tflops:.1%}"
    ),
    "weights GB": lambda row, _: _gigabytes(row, 0),
    "activations GB": lambda row, _: _gigabytes(row, 1),
    "block GB": lambda row, _: _gigabytes(row, 2),
    "memory GB": lambda row, _: f"{row.prediction.bytes / 1e9:.1f}",
}
"""Columns of the table: each name with the function that formats a cell."""


def _gigabytes(row: ClipCandidate, index: int) -> str:
    """Return the GB of a cause: 0 for weights, 1 for activations, 2 for the running block."""
    return f"{list(row.prediction.memory.values())[index] / 1e9:.1f}"


def table(rows: Sequence[ClipCandidate], cluster: Cluster) -> str:
    """Format the rows in aligned columns."""
    lines = [["", *COLUMNS]]
    for number, row in enumerate(rows, 1):
        lines.append([str(number), *(cell(row, cluster) for cell in COLUMNS.values())])
    return "\n".join(aligned(lines, range(1, 3)))


def call_of(run: ClipRun) -> str:
    """Return the call of ``parallel.diffusers.shard`` that a run makes."""
    if run.context == 1:
        return "shard(transformer)"
    options = [f'method="{run.method.context_parallel_method}"']
    defaults = FullContextConfig().plan_arguments(None)
    for name, value in run.method.plan_arguments(None).items():
        if name != "layout" and value != defaults[name]:
            options.append(f"{name}={value!r}")
    return f"shard(transformer, group, {', '.join(options)})"


def sources(run: ClipRun, cluster: Cluster) -> list[str]:
    """Describe the sources of the numbers."""
    kernel = RATED[cluster.attention_kernel].title if cluster.attention_kernel else "attention"
    dtype = "" if run.element_size == 2 else "; these are rates of bfloat16, float32 is slower"
    return [
        "where this comes from:",
        f"  time: matmuls at {cluster.matmul_fraction:.0%} of {cluster.peak_tflops:,g} TFLOP/s, "
        f"{kernel} at {cluster.attention_fraction:.0%}, the rest at the memory's rate{dtype}",
        "  memory: counted from the class's forward, without the allocator's reserve",
        "  no run on a GPU has been compared with it yet (docs/concepts/predictions.md)",
    ]


def print_largest(
    args: argparse.Namespace,
    model: Transformer,
    clip: Clip,
    run: ClipRun,
    name: str,
    cluster: Cluster,
    choices: Choices,
) -> None:
    """Print the clips of ``largest_clips``, with a row for each number of GPUs per clip."""
    largest = largest_clips(model, clip, run, cluster, choices)
    lines = [["GPUs a clip", *_heads(model, clip)]]
    entries = []
    for context, longest, widest in largest:
        cells = [] if model.makes_pictures else [_frames(longest)]
        lines.append([str(context), *cells, _size(widest)])
        entries.append(
            {
                "context": context,
                "frames": longest and longest.frames,
                "height": widest and widest.height,
                "width": widest and widest.width,
            }
        )
    if args.json:
        print(json.dumps(entries))
        return
    settings = f"{_memory_by(run)}, checkpointing {args.checkpointing}"
    trained = "all weights" if run.lora_rank is None else f"adapters of {run.lora_rank}"
    print(f"{name}, {counted(run.gpus, 'GPU')} of {cluster.name}: {trained}, {settings}")
    print("\n".join(aligned(lines, ())))
    print(f"a tenth of the {cluster.memory_gb:g} GB is left to the allocator")


def _heads(model: Transformer, clip: Clip) -> list[str]:
    heads = [f"largest of {counted(clip.frames, 'frame')}"]
    if model.makes_pictures:
        return ["largest picture"]
    return [f"longest of {clip.height} x {clip.width}", *heads]


def _frames(clip: Clip | None) -> str:
    return "none" if clip is None else counted(clip.frames, "frame")


def _size(clip: Clip | None) -> str:
    return "none" if clip is None else f"{clip.height:,} x {clip.width:,}"


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    return exit_status(plan, argv)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
