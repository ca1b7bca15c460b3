"""Tokenizers behind one interface: sentencepiece models and Hugging Face's tokenizer.json."""

import os
from pathlib import Path

from data.tokenizer.base import AddBos, Tokenizer
from data.tokenizer.hugging_face import HuggingFaceTokenizer
from data.tokenizer.sentence_piece import (
    END_OF_TEXT,
    SentencePieceTokenizer,
    to_train_on,
    train_tokenizer,
)
from runtime.errors import DataError

__all__ = [
    "END_OF_TEXT",
    "AddBos",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "to_train_on",
    "train_tokenizer",
]


def load_tokenizer(path: str | os.PathLike[str]) -> SentencePieceTokenizer | HuggingFaceTokenizer:
    """Load a tokenizer: `.model` is sentencepiece, `.json` Hugging Face.

    Raises DataError if the file is missing, damaged, of another kind, or has no end-of-text token.
    """
    suffix = Path(path).suffix
    if suffix == ".model":
        return SentencePieceTokenizer(path)
    if suffix == ".json":
        return HuggingFaceTokenizer(path)
    raise DataError(
        f"tokenizer {path} must be a sentencepiece .model or a Hugging Face tokenizer.json"
    )
