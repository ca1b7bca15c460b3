"""Sentencepiece tokenizers, and their training."""

import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data.text.indexed import writing
from data.tokenizer.base import Tokenizer, read_file, undamaged
from data.tokenizer.folder import json_beside
from runtime.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# sentencepiece writes a space as this character, so a literal one must be spelled as its UTF-8
# bytes.
_SPACE_MARK = "▁"
_KIND = "sentencepiece model"


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model`; a model of `train_tokenizer` round-trips every text exactly."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import sentencepiece

        content = read_file(path)
        with undamaged(path, _KIND):
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
            # Raises for pieces that are not UTF-8.
            self._model.id_to_piece(list(range(self._model.vocab_size())))
        if self._model.eos_id() < 0:
            raise DataError(
                f"{path} has no end-of-text token (eos_id is -1); use a tokenizer that has one"
            )
        super().__init__(os.fspath(path), content, self._model.vocab_size(), self._model.eos_id())
        self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self._set_added(json_beside(path, "tokenizer_config.json"))
        self.unknown = self._model.unk_id()
        mark = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
        self._mark = mark if all(self._model.is_byte(token) for token in mark) else None

    def _set_added(self, config: dict[str, Any]) -> None:
        """Set the tokens around a text from tokenizer_config.json; the model does not name them."""
        if config.get("add_bos_token") and self.bos is not None:
            self.before = (self.bos,)
        if config.get("add_eos_token"):
            self.after = (self.eod,)

    def tokenize(self, text: str) -> list[int]:
        if self._mark is None or _SPACE_MARK not in text:
            return self._model.encode(text)
        first, *parts = text.split(_SPACE_MARK)
        ids: list[int] = list(self._model.encode(first))
        for part in parts:
            ids += self._mark
            ids += self._model.encode(part)
        return ids

    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        with undamaged(self.path, _KIND):
            return self._model.decode(list(ids))  # control pieces have no text


def train_tokenizer(
    texts: Iterable[str], model_prefix: str | os.PathLike[str], vocab_size: int
) -> Path:
    """Train a byte-fallback BPE on the first 8 million characters; write `model_prefix`.model.

    Every text, Python sources included, round-trips exactly: nothing is normalised, no space is
    added or removed, and bytes spell characters that no piece covers. The same texts give the same
    file, byte for byte; it is written atomically.

    Raises DataError if there is no text, or if `vocab_size` is too small for the 256 bytes or
    larger than the texts can fill.
    """
    import sentencepiece

    # A list: if an iterator raises, sentencepiece prints a traceback and continues.
    lines: list[str] = []
    for text in to_train_on(texts):
        lines += filter(None, text.split("\n"))
    if not lines:
        raise DataError(
            "there is no text to train a tokenizer on; check the corpus's path and suffix"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            # Outside these bounds sentencepiece raises an error that names no bound, or takes
            # gigabytes of memory.
            vocab_size=min(max(vocab_size, 2), 1 << 24),
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9995,
            max_sentence_length=1 << 16,
            unk_id=0,
            eos_id=1,
            eos_piece=END_OF_TEXT,
            bos_id=-1,
            pad_id=-1,
            # The model file records num_threads, so it must not depend on the machine.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        fix = str(error)
        bound = re.search(r"(vs|<=) (\d+)\.", fix)
        if bound is not None:
            fix = f"give --vocab-size {bound[2]} or {'more' if bound[1] == 'vs' else 'less'}"
        raise DataError(
            f"vocab_size {vocab_size} does not suit the training text; {fix}"
        ) from error

    path = Path(f"{os.fspath(model_prefix)}.model")
    with writing(path) as (draft,):
        draft.write_bytes(model.getvalue())
    return path


def to_train_on(texts: Iterable[str]) -> Iterator[str]:
    """Yield the first 8 million characters of texts.

    They suffice to train a few thousand merges, and take about a second.
    """
    characters = 8_000_000
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
