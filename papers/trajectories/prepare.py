"""Turn episodes of reinforcement learning into training data: chains of attempts as tokens.

    python -m papers.trajectories.prepare --input buffer/ --trajectories 32 \\
        --output-prefix runs/data/walker
    python -m papers.trajectories.prepare --input a.jsonl b.jsonl --trajectories 4 --bins 64 \\
        --output-prefix runs/data/ab

An .npz is an episode in ExoRL's format, with observation, action and reward, and its folder is its
task. A row of JSON lines is an episode too, {"task": ..., "observation": [[...], ...], "action":
[...], "reward": [...]}. A chain has N attempts at one task, dealt at random and sorted by their
returns. Each step has a token for the return that remains to the chain's best one, one for each
number of the state and of the action, and one for the reward; only actions carry loss. PREFIX.json
has the bins, whose edges are quantiles; PREFIX.bin and .idx have the chains as packed samples.

Then: pretrain_gpt.py --data-path PREFIX --tokenizer-model PREFIX_tokenizer/tokenizer.json --sft ...
"""

import argparse
import sys
from pathlib import Path

from tools.common.arguments import at_least, one_line_errors, parser_for, positive, run_command


def build_parser() -> argparse.ArgumentParser:
    """Define the command line of ``python -m papers.trajectories.prepare``."""
    parser = parser_for("python -m papers.trajectories.prepare", __doc__)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, or folders to search for files with --suffix",
    )
    add(
        "--suffix",
        default=".npz",
        help="extension of the files to read from a folder (default: %(default)s)",
    )
    add(
        "--output-prefix",
        type=Path,
        required=True,
        metavar="PREFIX",
        help="path prefix of the output files",
    )
    add(
        "--trajectories",
        type=positive,
        required=True,
        metavar="N",
        help="number of attempts per chain",
    )
    add(
        "--bins",
        type=at_least(2),
        default=32,
        metavar="N",
        help="maximum number of bins per column (default: %(default)s)",
    )
    add(
        "--seq-length",
        type=positive,
        metavar="N",
        help="number of tokens per sample (default: that of the longest chain)",
    )
    add(
        "--seed",
        type=at_least(0),
        default=0,
        metavar="N",
        help="seed that deals attempts to chains (default: %(default)s)",
    )
    return parser


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command; return its exit status."""
    from data.text.corpus import input_files
    from data.text.record import TOKENIZER
    from papers.trajectories.episodes import Chains, read_episodes, write_chains
    from runtime.errors import DataError

    args = build_parser().parse_args(argv)
    prefix = args.output_prefix
    if Path(f"{prefix}.json").exists():
        raise DataError(f"{prefix}.json exists; give another --output-prefix, or remove the file")
    episodes = list(read_episodes(input_files(args.input, args.suffix)))
    if not episodes:
        raise DataError(
            f"there is no episode in {' '.join(args.input)}; check the paths and --suffix "
            f"{args.suffix}"
        )

    chains = Chains(
        trajectories=args.trajectories,
        bins=args.bins,
        seq_length=args.seq_length,
        seed=args.seed,
    )
    summary = write_chains(episodes, prefix, chains)
    print(
        f"wrote {prefix}.bin and .idx: {summary.sequences:,} chains of {args.trajectories} "
        f"attempts at {summary.tasks:,} tasks, {summary.tokens:,} tokens in {summary.samples:,} "
        f"samples, {summary.learned:,} of them actions, which carry loss; {summary.left_over:,} "
        "episodes are left over"
    )
    print(
        f"train on it with --data-path {prefix} --tokenizer-model "
        f"{prefix}{TOKENIZER}/tokenizer.json --sft --seq-length {summary.seq_length}"
    )


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
