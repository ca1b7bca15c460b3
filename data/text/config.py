"""Configuration of a language model's data, with the parsing of blends and splits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from runtime.errors import DataError, at_least


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the text to train on."""

    data_path: tuple[str, ...] = ()
    """Prefix of a Megatron .bin/.idx pair, or a blend: weight prefix weight prefix ..."""
    mock_data: bool = False
    """Train on random tokens, drawn from the seed, instead of files, to measure a run without data;
    needs --vocab-size. On the command line it replaces the data files and the tokenizer in
    --config's file, and --data-path replaces that file's mock_data."""
    split: str = "95,5,0"
    """Shares of the documents for training, validation and test."""
    tokenizer_model: str | None = None
    """Tokenizer file: a sentencepiece .model or a Hugging Face tokenizer.json."""
    data_cache_path: str | None = None
    """Folder for the cached sample indices, which all processes can read; by default PREFIX/cache
    next to the data.
    """
    blend_by_length: tuple[str, ...] = ()
    """Blend each file's training tokens by document length, TOKENS:SHARE ...: SHARE of them come
    from documents of more than TOKENS tokens, up to the next TOKENS. 4096:0.2 32768:0.5 leaves 0.3
    for documents of up to 4096. By default the shares are those of the files."""
    pack_documents: bool = False
    """Fill samples with whole documents by best fit; Megatron cuts samples from one stream. Only a
    document of more than seq_length tokens is cut, no label is another document's token, and the
    rest of a sample is padding without loss."""
    eod_mask_loss: bool = False
    """Mask the loss at the end of each document, where the label begins another document."""
    reset_position_ids: bool = False
    """Count positions from 0 in each document of a sample, instead of from the sample's start."""
    reset_attention_mask: bool = False
    """Let tokens attend only within their document, not to all earlier tokens of the sample. The
    samples of a micro-batch are then packed into one sequence for context parallelism."""
    sft: bool = False
    """Train on packed conversations of tools/prepare_data.py --chat, with loss only on the
    assistant's turns. It sets reset_attention_mask and reset_position_ids, and is refused if either
    is set to false."""
    num_workers: int = 0
    """Number of processes that read batches ahead; 0 reads in the training process."""

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
    """Fields of --config's file that a flag replaces, keyed by the flag's field."""
    IMPLIES: ClassVar[dict[str, tuple[str, ...]]] = {
        "sft": ("reset_attention_mask", "reset_position_ids")
    }
    """Fields that default to true if another field is true; keyed by that other field."""

    def __post_init__(self) -> None:
        split_shares(self.split)
        if self.data_path:
            blend(self.data_path)
        length_shares(self.blend_by_length)
        if self.mock_data:
            conflicts = [name for name in self.REPLACES["mock_data"] if getattr(self, name)]
            if conflicts:
                raise DataError(
                    "mock_data makes random tokens, so it cannot be combined with "
                    f"{', '.join(conflicts)}; leave those out, or give --no-mock-data"
                )
        at_least(self, 0, "num_workers")

    @property
    def tells_documents(self) -> bool:
        """True if samples mark where their documents start."""
        return self.reset_position_ids or self.reset_attention_mask

    @property
    def packing(self) -> str:
        """Words for messages on how documents are packed in a sequence; empty for one stream."""
        if self.reset_position_ids and self.reset_attention_mask:
            return f" of packed {'conversations' if self.sft else 'documents'}, each by itself"
        if self.reset_attention_mask:
            return " of packed documents, each attending only to itself"
        if self.reset_position_ids:
            return " of packed documents, each with positions from 0"
        return " of packed documents" if self.pack_documents else ""

    @property
    def length_blend(self) -> str:
        """Words for messages on the shares of tokens by document length."""
        parts = length_shares(self.blend_by_length)
        texts = []
        for number, (_, share) in enumerate(parts, start=1):
            length = "more"
            if number < len(parts):
                length = f"up to {parts[number][0]} tokens"
            texts.append(f"{length}: {share:.0%}")
        return ", ".join(texts)


def split_shares(split: str) -> list[float]:
    """Parse a split such as "95,5,0" into three shares that sum to 1.

    Missing shares are 0. Raises DataError if the split has another form.
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
            f'split is "{split}"; it must be one to three shares that are not all 0, '
            'such as "95,5,0"'
        )
    return [share / sum(shares) for share in (*shares, 0.0, 0.0)[:3]]


def length_shares(blend_by_length: Sequence[str]) -> list[tuple[int, float]]:
    """Parse ("4096:0.2", "32768:0.5") into [(0, 0.3), (4096, 0.2), (32768, 0.5)].

    Each pair is a length that documents exceed, in tokens, and their share of the tokens; without
    words it is [(0, 1.0)]. Raises DataError if a word has another form, thresholds do not ascend
    from 1, or shares are not above 0 with a sum below 1.
    """
    shares: list[tuple[int, float]] = []
    try:
        for threshold, share in (word.split(":") for word in blend_by_length):
            shares.append((int(threshold), float(share)))
    except ValueError:
        shares = [(0, 0.0)]  # refused below

    rest = 1 - sum(share for _, share in shares)
    thresholds = [0, *(threshold for threshold, _ in shares)]
    ascending = all(lower < upper for lower, upper in pairwise(thresholds))
    positive = all(share > 0 for _, share in shares)
    if not (ascending and positive and rest > 1e-6):  # nan fails every comparison
        raise DataError(
            f"blend_by_length is {' '.join(blend_by_length)}; it must be TOKENS:SHARE ..., with "
            "ascending numbers of tokens from 1, and shares above 0 with a sum below 1 (the rest "
            "is for shorter documents), such as 4096:0.2 32768:0.5"
        )
    return [(0, rest), *shares]


def blend(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return the prefixes of a data_path and their weights.

    Without weights (None), datasets are weighted by size, as in Megatron. Raises DataError if
    weights and prefixes do not alternate, a weight is not above 0, or a prefix ends in .bin or
    .idx.
    """
    if not data_path:
        raise DataError(
            "data_path is empty; give the prefix of a .bin/.idx pair (tools/prepare_data.py "
            "writes one)"
        )
    weights: list[float] | None = None
    if any(_number(word) is not None for word in data_path):
        weights = []
        for word in data_path[::2]:
            weight = _number(word)
            if weight is not None and 0 < weight < float("inf"):
                weights.append(weight)
        prefixes_are_numbers = any(_number(word) is not None for word in data_path[1::2])
        if len(data_path) % 2 or len(weights) != len(data_path) // 2 or prefixes_are_numbers:
            raise DataError(
                f"data_path is {' '.join(data_path)}; a blend must alternate weights above 0 and "
                "prefixes, such as 0.7 a 0.3 b"
            )

    prefixes = list(data_path[1::2] if weights else data_path)
    for prefix in prefixes:
        if prefix.endswith((".bin", ".idx")):
            raise DataError(f"data_path has {prefix}; give the prefix without {prefix[-4:]}")
    return prefixes, weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
