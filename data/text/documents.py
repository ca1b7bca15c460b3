"""Boundaries of documents inside of samples: those of the `.idx`, and end-of-document tokens. S
tokens of a sample.

Megatron's own flags look for end-of-document tokens alone, and its preprocess_data.py writes them
with --append-eod alone. The `.idx` knows every document, however it ends. A document may hold
several texts, each with its end: these are documents too.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset


def document_ends(ids: Tensor, eod: int, begins_document: bool) -> Tensor:
    """Mark the tokens of one document of the `.idx`, or of a part of it, that end a text: bool [T].

    A tokenizer such as GPT-2's begins a text with the token that ends it. As the first of several
    tokens it ends nothing.

    Args:
        ids: token ids, int64 [T].
        begins_document: True if the first id is the document's first.
    """
    ends = ids == eod
    if begins_document and len(ids) > 1:
        ends[0] = False
    return ends


class DocumentStream:
    """An epoch of GPTDataset, whose samples say where documents begin.

    A sample is cut from a stream, so its first document may have begun before it, and its last may
    go on after it; here both are documents of their own.
    """

    def __init__(self, dataset: "GPTDataset", lengths: np.ndarray, eod: int) -> None:
        """Take an epoch, the tokens of each document, int32 [documents], and the token that ends a
        document.
        """
        self._dataset, self._lengths, self._eod = dataset, lengths, eod

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._dataset)

    def __getitem__(self, index: int | None) -> dict[str, Any]:
        """Return GPTDataset's sample with `begins`, bool [S + 1]: the tokens, and the last label,
        that begin one.
        """
        sample = self._dataset[index]
        text = torch.cat((sample["tokens"], sample["labels"][-1:]))  # [S + 1]
        sample["begins"] = self._begins(
            text, 0 if index is None else index
        )  # it fills up with sample 0
        return sample

    def _begins(self, text: Tensor, index: int) -> Tensor:
        places, lengths, from_first = self._pieces(index, len(text))
        ends = text == self._eod
        ends[places[from_first & (lengths > 1)]] = False  # as ``document_ends`` of each piece

        begins = ends.roll(1)
        begins[0] = True
        begins[places] = True
        return begins

    def _pieces(self, index: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return place and tokens of each piece of a document in a sample, and whether its document
        begins there.
        """
        number = self._dataset.shuffle_index[index]
        first, offset = self._dataset.sample_index[number].tolist()
        last = int(self._dataset.sample_index[number + 1][0])

        lengths = self._lengths[self._dataset.document_index[first : last + 1]].astype(np.int64)
        lengths[0] -= offset
        from_first = np.ones(len(lengths), dtype=bool)
        from_first[0] = offset == 0
        places = np.cumsum(lengths) - lengths

        has_tokens = (lengths > 0) & (places < size)
        return places[has_tokens], lengths[has_tokens], from_first[has_tokens]
