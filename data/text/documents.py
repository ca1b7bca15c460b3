"""Find the tokens at which documents begin inside a sample. A sample has S tokens.

In Megatron's own code for --reset-position-ids and --reset-attention-mask, a document ends only at
an end-of-document token, but its preprocess_data.py writes these tokens only with --append-eod. The
`.idx` has the bounds of every document, however it ends. A document of the `.idx` may also contain
several texts, each with its end token; these count as documents too. So here a document begins at
a bound of the `.idx` and after every end token.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset


def document_ends(ids: Tensor, eod: int, begins_document: bool) -> Tensor:
    """Mark the tokens that end a text inside a document of the `.idx`, bool [T].

    The ids may be a part of the document. A tokenizer such as GPT-2's begins a text with the same
    token that ends it; as the first of several tokens, it is not an end.

    Args:
        ids: token ids, int64 [T].
        eod: the end-of-document token.
        begins_document: True if the first id is the document's first.
    """
    ends = ids == eod
    if begins_document and len(ids) > 1:
        ends[0] = False
    return ends


class DocumentStream:
    """An epoch of GPTDataset whose samples mark the first token of each document.

    A sample is cut from a stream, so its first document may begin before the sample, and its last
    one may continue after it. Both parts count as documents of this sample.
    """

    def __init__(self, dataset: "GPTDataset", lengths: np.ndarray, eod: int) -> None:
        """Wrap an epoch.

        Args:
            dataset: Megatron's samples.
            lengths: number of tokens of each document, int32 [documents].
            eod: the end-of-document token.
        """
        self._dataset = dataset
        self._lengths = lengths
        self._eod = eod

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._dataset)

    def __getitem__(self, index: int | None) -> dict[str, Any]:
        """Return GPTDataset's sample with `begins`, bool [S + 1].

        `begins` marks the tokens, including the last label, that begin a document.
        """
        sample = self._dataset[index]
        text = torch.cat((sample["tokens"], sample["labels"][-1:]))  # [S + 1]
        # GPTDataset returns sample 0, without loss, for None.
        sample["begins"] = self._begins(text, 0 if index is None else index)
        return sample

    def _begins(self, text: Tensor, index: int) -> Tensor:
        positions, lengths, begins_document = self._pieces(index, len(text))
        ends = text == self._eod
        ends[positions[begins_document & (lengths > 1)]] = False  # as in `document_ends`

        begins = ends.roll(1)
        begins[0] = True
        begins[positions] = True
        return begins

    def _pieces(self, index: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the pieces of documents that make up a sample, as arrays [pieces].

        The arrays are the position of the first token, the number of tokens, and whether the piece
        begins its document.
        """
        number = self._dataset.shuffle_index[index]
        first, offset = self._dataset.sample_index[number].tolist()
        last = int(self._dataset.sample_index[number + 1][0])

        lengths = self._lengths[self._dataset.document_index[first : last + 1]].astype(np.int64)
        lengths[0] -= offset
        begins_document = np.ones(len(lengths), dtype=bool)
        begins_document[0] = offset == 0
        positions = np.cumsum(lengths) - lengths

        has_tokens = (lengths > 0) & (positions < size)
        return positions[has_tokens], lengths[has_tokens], begins_document[has_tokens]
