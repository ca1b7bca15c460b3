"""Tokenizers of Hugging Face's tokenizer.json, with the ids of transformers.

No text of a document may become a control token: a web page that spells <|endoftext|> would end its
document, and one that spells <|im_start|> would begin a turn. The library's flag
encode_special_tokens reads special tokens as ordinary text, so every control token is made special,
whatever flag its entry has, and the flag is set except while a chat template's text is encoded.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from data.tokenizer.added_tokens import backend_with_unknown, make_special, unknown_id
from data.tokenizer.base import Tokenizer, read_file, undamaged
from data.tokenizer.folder import load_folder
from data.tokenizer.sentence_piece import END_OF_TEXT
from runtime.errors import DataError
from runtime.files import sha256

# End-of-text tokens of well-known tokenizers, tried if no tokenizer_config.json names one.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]")
_KIND = "Hugging Face tokenizer.json"
Span = tuple[int, int]
"""Character range [begin, end) in a text."""


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` with the files next to it, loaded as `transformers` loads the folder.

    The end-of-text token is the `eos_token` of a `tokenizer_config.json` in the same folder, else
    the first well-known one in the vocabulary.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from tokenizers.processors import ByteLevel

        # Work is divided over processes here, and the library's threads would warn at each fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        content = read_file(path)
        with undamaged(path, _KIND):
            folder = load_folder(Path(path), content)
            self._backend = folder.backend
            self._backend.no_truncation()
            self._backend.no_padding()
            ids = self._backend.get_vocab(with_added_tokens=True).values()
        # Added tokens may leave gaps, so the highest id can exceed the number of entries.
        vocab_size = max(ids, default=-1) + 1
        if vocab_size > 10 * len(ids) + 1000:
            raise DataError(
                f"{path} has id {vocab_size - 1}, but only {len(ids)} entries; it is damaged: copy "
                "it again"
            )
        eod = self._end_of_text(path, folder.special_tokens.get("eos_token"))
        super().__init__(os.fspath(path), content, vocab_size, eod)
        self.settings = sha256(json.dumps(folder.settings))

        self.before, self.after = self._added_around()
        # With this post-processor, a token's offsets include its leading space.
        self._backend.post_processor = ByteLevel(trim_offsets=False)
        self._guard(folder.control)
        if "bos_token" in folder.special_tokens:
            self.bos = self._backend.token_to_id(folder.special_tokens["bos_token"])
        unknown = unknown_id(self._backend, content)
        self.unknown = None if unknown == self.eod else unknown
        self._with_unknown = backend_with_unknown(self._backend)

    def _end_of_text(self, path: str | os.PathLike[str], end_token: str | None) -> int:
        """Return the id of the end-of-text token. Raises DataError if there is none."""
        ends = _KNOWN_ENDS if end_token is None else (end_token, *_KNOWN_ENDS)
        for end in ends:
            token = self._backend.token_to_id(end)
            if token is not None:
                return token
        raise DataError(
            f"{path} has no end-of-text token (none of {', '.join(ends)}); name it as eos_token in "
            "a tokenizer_config.json beside it"
        )

    def _added_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the post-processor adds before and after a text."""
        text = self._backend.id_to_token(self.eod)  # any text of one token
        encoding = self._backend.encode(text, add_special_tokens=True)
        positions = []
        for position, is_added in enumerate(encoding.special_tokens_mask):
            if not is_added:
                positions.append(position)
        if not positions:
            return (), ()
        return tuple(encoding.ids[: positions[0]]), tuple(encoding.ids[positions[-1] + 1 :])

    def _guard(self, control: frozenset[str]) -> None:
        """Keep document text from being encoded as control tokens.

        This includes control tokens that the tokenizer's file does not flag as special.
        """
        added_tokens = self._backend.get_added_tokens_decoder()
        control |= {token.content for number, token in added_tokens.items() if number == self.eod}
        control_tokens = [token for token in added_tokens.values() if token.content in control]
        # While encode_special_tokens is set, special tokens are read as ordinary text; the flag
        # changes nothing else of an encoding.
        make_special(self._backend, control_tokens)
        self._backend.encode_special_tokens = True
        self._control = frozenset(token.content for token in control_tokens)
        self.special = _any_of(self._control)
        """Matches the text of every control token."""
        self.added = _any_of(token.content for token in added_tokens.values())
        """Matches the text of every added token."""
        self.added_ids = frozenset(added_tokens)
        """Ids of all added tokens."""

        self._stripping: set[int] = set()
        self._by_encoding: set[str] = set()
        for number, token in added_tokens.items():
            if token.lstrip or token.rstrip:
                self._stripping.add(number)
            if token.normalized or token.single_word:
                self._by_encoding.add(token.content)
        self.spelled = self.search_for(())
        """Returns the first control token that a text spells; None if there is none."""

    def tokenize(self, text: str) -> list[int]:
        with undamaged(self.path, _KIND):
            # The batch method computes no offsets.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self.eod in ids:
            raise DataError(
                f"a text contains {self._backend.id_to_token(self.eod)!r}, which {self.path} "
                "encodes as the end-of-document token, so it would end the document; remove it "
                "from the text"
            )
        return ids

    def tokenize_special(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the ids and spans of a text, with special tokens in it read as special.

        If a token takes the white space around it (lstrip, rstrip), its span excludes that white
        space.
        """
        with undamaged(self.path, _KIND):
            self._backend.encode_special_tokens = False
            try:
                encoding = self._backend.encode(text, add_special_tokens=False)
            finally:
                self._backend.encode_special_tokens = True
        spans: list[Span] = encoding.offsets
        if self._stripping:
            for position, number in enumerate(encoding.ids):
                if number in self._stripping:
                    spans[position] = _without_white_space(text, spans[position])
        return encoding.ids, spans

    def dropped(self, text: str, special: bool = False) -> int:
        if self._with_unknown is None:
            return 0
        self._with_unknown.encode_special_tokens = not special
        with undamaged(self.path, _KIND):
            all_ids = self._with_unknown.encode(text, add_special_tokens=False).ids
        ids = self.tokenize_special(text)[0] if special else self.tokenize(text)
        return len(all_ids) - len(ids)

    def is_paired(self, text: str) -> bool:
        """Return whether an added token has a partner, as <think> has </think>."""
        opening = text.replace("</", "<", 1).replace("[/", "[", 1)
        bracket = "<" if opening.startswith("<") else "["
        closing = opening.replace(bracket, f"{bracket}/", 1)
        if text in self._control:
            return False
        return all(self.added.fullmatch(token) for token in (opening, closing))

    def search_for(self, texts: Iterable[str]) -> Callable[[str], str | None]:
        """Return a function that finds a control token, or one of ``texts``, in a text.

        That function returns the first one, or None. A token that is matched in normalized text, or
        only as a whole word, is searched by encoding the text.
        """
        tokens = self._control.union(texts)
        pattern = _any_of(tokens)

        def by_pattern(text: str) -> str | None:
            match = pattern.search(text)
            return None if match is None else match[0]

        def by_encoding(text: str) -> str | None:
            ids, _ = self.tokenize_special(text)
            for token in map(self._backend.id_to_token, ids):
                if token in tokens:
                    return token
            return None

        return by_pattern if tokens.isdisjoint(self._by_encoding) else by_encoding

    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        with undamaged(self.path, _KIND):
            return self._backend.decode(list(ids), skip_special_tokens=not special)


def _without_white_space(text: str, span: Span) -> Span:
    """Return a span of a text without the white space at its ends."""
    begin, end = span
    token = text[begin:end]
    return begin + len(token) - len(token.lstrip()), end - len(token) + len(token.rstrip())


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of these texts, the longest first."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
