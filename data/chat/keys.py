"""Classify the keys of rows and turns as metadata, loss flags, or content.

A key that the template names is passed on to it. Of the other keys, known metadata is ignored, keys
that must not get lost (pictures, reasoning, preferences, loss masks) are refused, and the rest is
counted and reported. So no part of a conversation is lost silently, and a data set with ordinary
metadata still needs no cleaning.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import DataError

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys that may hold a turn's reasoning, in the order of the transformers library."""
MARKS = (
    "train",
    "training",
    "trainable",
    "learn",
    "loss",
    "weight",
    "loss_weight",
    "loss_scale",
    "loss_mask",
    "step_loss_mask",
)
"""Keys of loss flags: true or 1 for a turn that is learned (carries loss), false or 0 if not."""
MASKED = "masked"
"""Loss flag with the opposite meaning, as in torchtune: true or 1 if a turn is not learned."""

_HARMLESS_WORDS = """
    id idx index uid uuid guid hash key name_id source src origin dataset data_source
    dataset_name subset split config file filename path url link license licence copyright lang
    language languages locale country state region category categories subcategory tag tags
    topic topics subject subjects domain domains task tasks task_type type kind field format
    difficulty level quality score scores rating ratings rank votes upvotes downvotes likes
    reward rewards confidence metric metrics model model_name models generator engine provider
    author authors annotator annotators user_name username created created_at create_time
    updated updated_at update_time timestamp time date year version metadata meta meta_data
    extra_info info stats statistics turn num_turns n_turns turn_count token_count num_tokens
    n_tokens tokens_count length len word_count char_count num_chars usage finish_reason
    stop_reason logprobs latency duration toxic toxicity redacted openai_moderation
    detoxify_moderation moderation header headers hashed_ip is_safe safe safety verified
    is_verified correct is_correct passed synthetic review_state review_count emojis embedding
    embeddings cluster cluster_id seed temperature top_p max_tokens cache_control comment
    comments note notes title description_id __index_level_0__
"""
HARMLESS = frozenset(_HARMLESS_WORDS.split())
"""Keys of rows and turns that are ignored: metadata, not part of the conversation."""
_HARMLESS_ENDS = re.compile(
    r".+_(?:id|ids|uuid|hash|score|scores|rating|time|timestamp|at|count|url|version|lang)"
)
_LINKS = ("tool_call_id",)
_PICTURES = re.compile(
    r"(?:.*_)?(?:images?|imgs?|pictures?|photos?|pixel_values|audios?|waveforms?|videos?|"
    r"attachments?)"
    r"(?:_.*|urls?|paths?|files?)?|speech|media",
    re.I,
)
_PREFERENCE_WORDS = """
    chosen rejected rejected_response rejected_responses rejected_messages chosen_messages
    chosen_response rejected_conversations kto_tag preferred dispreferred preferred_output
    non_preferred_output
"""
_PREFERENCES = frozenset(_PREFERENCE_WORDS.split())
_MARK_LIKE = re.compile(
    r"(?:.*_)?(?:loss|mask|masks|weight|weights|train|training|trainable|trained|learn)(?:_.*)?"
)
_THOUGHT_LIKE = re.compile(
    r"(?:.*_)?(?:think|thinking|thought|thoughts|reason|reasons|reasoning|cot|chain_of_thought|"
    r"rationale|analysis|scratchpad|monologue)(?:_(?!effort|budget).*)?"
)
_CONTENT = ("tools", "functions", "documents", "tool_calls", "function_call", "refusal")


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Names that a chat template uses; keys with these names are passed on to it."""

    variables: frozenset[str] = frozenset()
    """Variables that the caller must define, such as documents."""
    names: frozenset[str] = frozenset()
    """Attributes and string constants; every key of a turn that the template could read is among
    them. Rendering shows which keys it does read."""
    texts: frozenset[str] = frozenset()
    """String constants; a turn may have one of them as its role."""

    def __or__(self, other: "Reads") -> "Reads":
        return Reads(
            variables=self.variables | other.variables,
            names=self.names | other.names,
            texts=self.texts | other.texts,
        )

    @property
    def parts(self) -> bool:
        """True if the template supports a content that is a list of parts."""
        return {"type", "text"} <= self.names

    @property
    def thoughts(self) -> bool:
        """True if the template reads the reasoning of an assistant's turn."""
        return not self.names.isdisjoint(THOUGHTS)


def says_nothing(value: Any) -> bool:
    """Return whether a value is null or empty, as columnar files write for missing keys."""
    return value is None or (isinstance(value, (str, list, tuple, dict)) and not value)


def is_unread(where: str, key: str, value: Any) -> bool:
    """Return whether to report a key that the template does not read.

    Raises DataError if the key holds content that must not be lost (such as pictures, reasoning or
    a preference), or looks like a loss mask.
    """
    if says_nothing(value):
        return False
    refuse_pictures(where, key, value)
    if key in _PREFERENCES or (key == "label" and isinstance(value, bool)):
        raise DataError(
            f"{where} has {key}, a key of preference data, which is not supported; write the "
            'preferred answer as a turn of "messages" and leave the others out'
        )
    if key in _CONTENT:
        raise DataError(
            f"{where} has {key}, but the chat template does not use it, so it would be lost; give "
            f"a template that writes it, or leave out {key} or the conversation"
        )
    if key in HARMLESS:
        return False
    if _MARK_LIKE.fullmatch(key):
        raise DataError(
            f"{where} has {key}, which looks like a loss mask but is not supported; mark whole "
            f'turns of the assistant with "train": false, or remove {key}'
        )
    if _THOUGHT_LIKE.fullmatch(key) and isinstance(value, (str, list, dict)):
        raise DataError(
            f"{where} has {key}, reasoning that the chat template does not use, so it would be "
            f"lost; give a template that writes it, or leave out {key} or the conversation"
        )
    return key in _LINKS or not _HARMLESS_ENDS.fullmatch(key)


def refuse_pictures(where: str, key: str, value: Any) -> None:
    """Raise DataError if a key for pictures, sound or video has a value."""
    if value and _PICTURES.fullmatch(key):  # a count of 0 pictures is harmless
        raise DataError(
            f"{where} has {key}, but pictures, sound and video are not supported; "
            "leave the conversation out"
        )


def mark_of(where: str, contents: Mapping[str, Any]) -> bool | None:
    """Return the loss flag of a row or turn: True if learned, False if not, None without a flag.

    Raises DataError if a flag is not true, false, 1 or 0, or if two flags contradict each other.
    """
    marks: dict[str, bool] = {}
    for key in (*MARKS, MASKED):
        value = contents.get(key)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise DataError(
                f"{where} has {key} {value!r:.40}, but a turn is either learned (true or 1) or not "
                f"(false or 0); give one of these values, or remove {key}"
            )
        marks[key] = bool(value) != (key == MASKED)
    if len(set(marks.values())) > 1:
        names = " and ".join(f"{key} {contents[key]!r}" for key in marks)
        raise DataError(f"{where} has {names}, which contradict each other; remove one of them")
    return next(iter(marks.values()), None)
