"""Turn episodes of reinforcement learning into what training reads: chains of attempts in tokens.

    python -m papers.trajectories.prepare --input buffer/ --trajectories 32 --output-prefix runs/data/walker
    python -m papers.trajectories.prepare --input a.jsonl b.jsonl --trajectories 4 --bins 64 \\
        --output-prefix runs/data/ab

An .npz is an episode as ExoRL has it, with observation, action and reward, and its folder is its
task; a row of JSON lines, {"task": ..., "observation": [[...], ...], "action": [...], "reward":
[...]}, is one too. A chain has so many attempts at one task, dealt at random and sorted by their
returns. Each step is a token for the return that is left to the chain's best one, for each number
of the state and of the action, and for the reward; actions alone carry loss. The bins, by
quantiles, lie in PREFIX.json, and the chains as packed samples at PREFIX.

Then: pretrain_gpt.py --data-path PREFIX --tokenizer-model PREFIX_tokenizer/tokenizer.json --sft ...
"""

import sys
from pathlib import Path

from tools.common.arguments import at_least, one_line_errors, parser_for, positive, run_command


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command; return its exit status."""
    from data.text.corpus import input_files
    from data.text.record import TOKENIZER
    from papers.trajectories.episodes import Chains, read_episodes, write_chains
    from runtime.errors import DataError

    parser = parser_for("python -m papers.trajectories.prepare", __doc__)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files; folders are searched for --suffix",
    )
    add(
        "--suffix",
        default=".npz",
        help="ending of the files taken from a folder (default: %(default)s)",
    )
    add("--output-prefix", type=Path, required=True, metavar="PREFIX", help="where to write")
    add("--trajectories", type=positive, required=True, metavar="N", help="attempts of a chain")
    add(
        "--bins",
        type=at_least(2),
        default=32,
        metavar="N",
        help="most bins of a number (default: %(default)s)",
    )
    add(
        "--seq-length",
        type=positive,
        metavar="N",
        help="tokens of a sample (default: the longest chain's)",
    )
    add(
        "--seed",
        type=at_least(0),
        default=0,
        metavar="N",
        help="deals attempts to chains (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    prefix = args.output_prefix
    if Path(f"{prefix}.json").exists():
        raise DataError(
            f"{prefix}.json is there already; give another --output-prefix, or remove it"
        )
    episodes = list(read_episodes(input_files(args.input, args.suffix)))
    if not episodes:
        raise DataError(
            f"there is no episode in {' '.join(args.input)}; check the paths and --suffix {args.suffix}"
        )
    names = ("trajectories", "bins", "seq_length", "seed")
    written = write_chains(
        episodes, prefix, Chains(**{name: getattr(args, name) for name in names})
    )
    print(
        f"wrote {prefix}.bin and .idx: {written.sequences:,} chains of {args.trajectories} attempts at "
        f"{written.tasks:,} tasks, {written.tokens:,} tokens in {written.samples:,} samples, "
        f"{written.learned:,} of them actions, which carry loss; {written.left_over:,} episodes are left over"
    )
    sft = f"--sft --seq-length {written.seq_length}"
    print(
        f"train on it with --data-path {prefix} --tokenizer-model {prefix}{TOKENIZER}/tokenizer.json {sft}"
    )


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
