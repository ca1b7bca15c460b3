"""Check the data of a path prefix, show its texts, and count its tokens by document length."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from data.text.indexed import Indexed
    from data.tokenizer import Tokenizer

_GREEN = "\033[32m"
_PLAIN = "\033[0m"
_SHOWN = 400
"""Number of characters shown at each end of a long text."""
LONGER = (1 << 10, 1 << 12, 1 << 15, 1 << 17)
_BAR = 40


def check_prefix(prefix: str, tokenizer: "Tokenizer") -> str:
    """Check all data of a path prefix; return a one-line summary.

    Raises:
        DataError: something would stop training, a document written by tools.prepare_data lacks
            its end token, or a loss mask does not match the tokens.
    """
    import numpy as np

    from data.text.indexed import LOSS_MASK, check_indexed
    from data.text.packing import Conversations

    everything = np.iinfo(np.int64).max
    indexed = check_indexed(prefix, tokenizer.vocab_size, scan_tokens=everything)
    indexed.check_tokenizer(tokenizer.path, tokenizer.sha256, tokenizer.settings)
    sizes = f"{indexed.tokens:,} tokens ({indexed.dtype})"
    if not indexed.holds_conversations:
        documents = f"{len(indexed.document_lengths):,} documents"
        return f"{prefix}: {documents}, {sizes}{_ends(indexed, tokenizer.eod)}"

    mask = check_indexed(prefix + LOSS_MASK, 2, scan_tokens=everything).token_ids()
    conversations = Conversations(prefix, tokenizer.vocab_size, everything, check=True)
    longest = conversations.longest
    samples = len(conversations)
    return (
        f"{prefix}: {len(indexed.lengths):,} conversations, {sizes}, packed into {samples:,} "
        f"samples of up to {longest:,} tokens, {1 - indexed.tokens / samples / longest:.2%} "
        f"padding to the longest; {int(mask.sum(dtype=np.int64)):,} tokens carry loss"
    )


def _ends(indexed: "Indexed", eod: int) -> str:
    """Return the summary's note on documents without the end-of-document token; may be empty.

    Raises DataError if there are any although tools.prepare_data wrote the data, since it ends
    every document with this token.
    """
    import numpy as np

    from runtime.errors import DataError

    lengths = indexed.document_lengths
    last_tokens = np.cumsum(lengths, dtype=np.int64)[lengths > 0] - 1
    without_end = int((indexed.token_ids()[last_tokens] != eod).sum())
    if without_end and os.path.exists(f"{indexed.prefix}.json"):
        raise DataError(
            f"{indexed.prefix}.bin holds {without_end:,} documents that do not end with the "
            f"tokenizer's end-of-document token, {eod}; prepare the text again with this tokenizer"
        )

    lumped = ""
    if indexed.is_lumped:
        lumped = " (its .idx lists them as sequences of one document)"
    if not without_end:
        return lumped

    return (
        f"{lumped}; {without_end:,} of them do not end with the tokenizer's end-of-document token, "
        f"{eod}: the .idx tells them apart in training, but a model does not learn from them to "
        "end a text"
    )


def shown(
    prefix: str, tokenizer: "Tokenizer", count: int, whole: bool, colour: bool
) -> Iterator[str]:
    """Yield lines that show the first ``count`` documents, or samples of conversations, as text.

    Tokens that carry loss are green, or without ``colour`` between ⟦ and ⟧.

    Args:
        whole: show each text completely, instead of only its beginning and end.
    """
    import numpy as np

    from data.text.indexed import LOSS_MASK, check_indexed

    indexed = check_indexed(prefix, tokenizer.vocab_size)
    loss_mask = None
    if indexed.holds_conversations:
        loss_mask = check_indexed(prefix + LOSS_MASK, 2).token_ids()
        samples = []
        for first, end in pairwise(indexed.bounds[: count + 1].tolist()):
            samples.append(indexed.lengths[first:end].tolist())
    else:
        samples = [[length] for length in indexed.document_lengths[:count].tolist()]

    kind = "document" if loss_mask is None else "sample"
    ids = indexed.token_ids()
    begin = 0
    for number, lengths in enumerate(samples):
        yield f"=== {kind} {number}: {sum(lengths):,} tokens"
        for index, length in enumerate(lengths, 1):
            end = begin + length
            mask = np.zeros(length, bool)
            if loss_mask is not None:
                yield f"--- conversation {index} of {len(lengths)}: {length:,} tokens"
                mask = loss_mask[begin:end] > 0

            text = _marked_text(tokenizer, ids[begin:end], mask)
            if not whole:
                text = _shortened(text)
            yield _with_marks(text, colour)
            begin = end


def _marked_text(
    tokenizer: "Tokenizer", ids: "np.ndarray", mask: "np.ndarray"
) -> list[tuple[str, bool]]:
    """Return the characters of a text, each with True if its token carries loss.

    Tokens with and without loss are decoded separately, so that no character mixes the two kinds.
    """
    import numpy as np

    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    characters = []
    for first, end in pairwise(cuts):
        for character in tokenizer.detokenize(ids[first:end].tolist(), special=True):
            characters.append((character, bool(mask[first])))

    return characters


def _shortened(text: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Replace the middle of a long text by a note."""
    if len(text) <= 2 * _SHOWN + 100:
        return text
    note = (
        f"\n... {len(text) - 2 * _SHOWN:,} of {len(text):,} characters left out; "
        "--whole shows them ...\n"
    )
    return [*text[:_SHOWN], *((character, False) for character in note), *text[-_SHOWN:]]


def _with_marks(text: list[tuple[str, bool]], colour: bool) -> str:
    """Return a text with ⟦ and ⟧, or colours, around the characters that carry loss."""
    begin = "⟦"
    end = "⟧"
    if colour:
        begin = _GREEN
        end = _PLAIN

    parts = []
    for marked, pairs in groupby(text, key=itemgetter(1)):
        run = "".join(character for character, _ in pairs)
        if marked:
            run = f"{begin}{run}{end}"
        parts.append(run)
    return "".join(parts)


def shares(lengths: "np.ndarray", longer: "Sequence[int] | np.ndarray") -> "np.ndarray":
    """Return, for each length in ``longer``, the share of tokens in longer texts: float64."""
    import numpy as np

    ascending = np.sort(lengths)
    tokens_before = np.concatenate(([0], np.cumsum(ascending, dtype=np.int64)))
    first_longer = np.searchsorted(ascending, longer, side="right")
    return 1 - tokens_before[first_longer] / tokens_before[-1]


def share_lines(lengths: "np.ndarray", kind: str) -> Iterator[str]:
    """Yield a heading, and a line for each length in ``LONGER``.

    A line has the share of tokens in longer texts, as a number and as a bar.
    """
    yield f"tokens in {kind}s longer than"
    for longer, share in zip(LONGER, shares(lengths, LONGER), strict=True):
        yield f"{longer:>9,} {share:7.2%} {'█' * round(_BAR * share)}".rstrip()
