"""Options of the data of language models, and of blends and splits of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from runtime.errors import DataError, at_least


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Options of the text to train on."""

    data_path: tuple[str, ...] = ()
    """Prefix of a Megatron .bin/.idx pair, or a blend: weight prefix weight prefix ..."""
    mock_data: bool = False
    """Train on tokens drawn from the seed instead of files, to measure a run without data; needs
    --vocab-size. On the command line it takes the place of the files and the tokenizer that
    --config's file names, and so does --data-path of a file's mock_data."""
    split: str = "95,5,0"
    """Shares of the documents for training, validation and test."""
    tokenizer_model: str | None = None
    """Tokenizer file: a sentencepiece .model or a Hugging Face tokenizer.json."""
    data_cache_path: str | None = None
    """Folder for the sample indices, seen by all processes; by default PREFIX/cache beside the
    data.
    """
    blend_by_length: tuple[str, ...] = ()
    """TOKENS:SHARE ...: the share of the training tokens of each file that is from documents of
    more than so many tokens, up to the next TOKENS: 4096:0.2 32768:0.5 leaves 0.3 for those of up
    to 4096. By default as the files have it."""
    pack_documents: bool = False
    """Fill samples with whole documents by best fit, where Megatron cuts them from one stream: only
    a document of more than seq_length tokens is cut, no label is another document's token, and what
    is left of a sample is padding without loss."""
    eod_mask_loss: bool = False
    """Leave out the loss at the end of documents: what follows is another document's beginning."""
    reset_position_ids: bool = False
    """Count positions from 0 in each document of a sample, not through the sample."""
    reset_attention_mask: bool = False
    """Let tokens attend inside their document alone, not to all before them in the sample. The
    samples of a micro-batch are then one sequence for context parallelism."""
    sft: bool = False
    """Train on packed conversations of tools/prepare_data.py --chat, with loss on what the
    assistant says alone. It sets reset_attention_mask and reset_position_ids, without which it is
    refused."""
    num_workers: int = 0
    """Processes that read batches ahead; 0 reads in the training process."""

    REPLACES: ClassVar[dict[str, tuple[str, ...]]] = {
        "mock_data": (
            "data_path",
            "tokenizer_model",
            "reset_position_ids",
            "reset_attention_mask",
            "sft",
            "pack_documents",
            "blend_by_length",
        ),
        "data_path": ("mock_data",),
    }
    """The fields of --config's file that a flag takes the place of."""
    IMPLIES: ClassVar[dict[str, tuple[str, ...]]] = {
        "sft": ("reset_attention_mask", "reset_position_ids")
    }
    """The fields that a true one sets, where they are not given."""

    def __post_init__(self) -> None:
        split_shares(self.split)
        if self.data_path:
            blend(self.data_path)
        length_shares(self.blend_by_length)
        if self.mock_data and (
            there := [name for name in self.REPLACES["mock_data"] if getattr(self, name)]
        ):
            raise DataError(
                f"mock_data draws tokens, with which {', '.join(there)} cannot go; leave these out, or mock_data "
                "(--no-mock-data)"
            )
        at_least(self, 0, "num_workers")

    @property
    def tells_documents(self) -> bool:
        """True if samples tell where their documents start."""
        return self.reset_position_ids or self.reset_attention_mask

    @property
    def packing(self) -> str:
        """Say how documents share a sequence, after the number of its tokens; empty where all are
        one text.
        """
        if self.reset_position_ids and self.reset_attention_mask:
            return f" of packed {'conversations' if self.sft else 'documents'}, each by itself"
        if self.reset_attention_mask:
            return " of packed documents, each attending to itself alone"
        if self.reset_position_ids:
            return " of packed documents, each with positions from 0"
        return " of packed documents" if self.pack_documents else ""

    @property
    def length_blend(self) -> str:
        """Say which share of the tokens is from documents of which lengths."""
        longer, shares = zip(*length_shares(self.blend_by_length), strict=True)
        lengths = [*(f"up to {tokens} tokens" for tokens in longer[1:]), "more"]
        return ", ".join(
            f"{length}: {share:.0%}" for length, share in zip(lengths, shares, strict=True)
        )


def split_shares(split: str) -> list[float]:
    """Parse a split such as "95,5,0" into three shares that sum to 1; missing ones are 0. Raises
    DataError.
    """
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    # An "inf" leaves no shares, and "nan" fails every comparison.
    if (
        not 1 <= len(shares) <= 3
        or not all(0 <= share < float("inf") for share in shares)
        or sum(shares) == 0
    ):
        raise DataError(
            f'split is "{split}"; it must be one to three shares that are not all 0, such as "95,5,0"'
        )
    return [share / sum(shares) for share in (*shares, 0.0, 0.0)[:3]]


def length_shares(blend_by_length: Sequence[str]) -> list[tuple[int, float]]:
    """Parse ("4096:0.2", "32768:0.5") into [(0, 0.3), (4096, 0.2), (32768, 0.5)]; nothing is [(0,
    1.0)].

    Raises DataError: a word of another form, thresholds that do not ascend from 1, or shares that
    are not above 0 and in all below 1.
    """
    try:
        pairs = [word.split(":") for word in blend_by_length]
        shares = [(int(threshold), float(share)) for threshold, share in pairs]
    except ValueError:
        shares = [(0, 0.0)]
    thresholds, rest = (
        [0, *(threshold for threshold, _ in shares)],
        1 - sum(share for _, share in shares),
    )
    ascending = all(a < b for a, b in pairwise(thresholds))
    if not (
        ascending and all(share > 0 for _, share in shares) and rest > 1e-6
    ):  # nan fails every comparison
        raise DataError(
            f"blend_by_length is {' '.join(blend_by_length)}; it must be TOKENS:SHARE ..., with ascending numbers of "
            "tokens from 1 and shares above 0 whose sum is below 1, the rest being of shorter documents: 4096:0.2 "
            "32768:0.5"
        )
    return [(0, rest), *shares]


def blend(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return prefixes and weights of a data_path. As in Megatron, None weighs prefixes by their
    sizes.

    Raises DataError: weights and prefixes do not alternate, a weight is not above 0, or a prefix
    ends in .bin or .idx.
    """
    if not data_path:
        raise DataError(
            "data_path is empty; give the prefix of a .bin/.idx pair (tools/prepare_data.py writes one)"
        )
    numbers = [_number(word) for word in data_path]
    weights: list[float] | None = None
    if any(number is not None for number in numbers):
        weights = [
            number for number in numbers[::2] if number is not None and 0 < number < float("inf")
        ]
        if (
            len(numbers) % 2
            or len(weights) != len(numbers) // 2
            or any(n is not None for n in numbers[1::2])
        ):
            raise DataError(
                f"data_path is {' '.join(data_path)}; a blend alternates weights above 0 and prefixes: 0.7 a 0.3 b"
            )
    prefixes = list(data_path[1::2] if weights else data_path)
    for prefix in prefixes:
        if prefix.endswith((".bin", ".idx")):
            raise DataError(f"data_path names {prefix}; give the prefix without {prefix[-4:]}")
    return prefixes, weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
