"""Classify the keys of rows and turns as metadata, marks of loss, or content.

A key that the template names is passed on to it. Of the others, keys known to be metadata are
ignored, keys whose loss would do harm (pictures, thoughts, preferences, marks of loss) are refused,
and the rest is counted and reported. So no part of a conversation is lost silently, and a data set
with ordinary metadata still needs no cleaning.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import DataError

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a turn's thought, in the order in which transformers looks for them."""
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
"""Keys that mark a turn as learned, with true or 1, or as not learned, with false or 0."""
MASKED = "masked"
"""Key of the opposite meaning, as in torchtune."""

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
"""Keys of rows and turns that are metadata, not part of the conversation."""
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
    """The names that a chat template uses."""

    variables: frozenset[str] = frozenset()
    """Variables that it takes from outside, such as documents."""
    names: frozenset[str] = frozenset()
    """Attributes and string constants: all possible keys of a turn. Which of them it reads shows
    when it is rendered."""
    texts: frozenset[str] = frozenset()
    """String constants, some of which may be roles."""

    def __or__(self, other: "Reads") -> "Reads":
        return Reads(
            variables=self.variables | other.variables,
            names=self.names | other.names,
            texts=self.texts | other.texts,
        )

    @property
    def parts(self) -> bool:
        """True if the template reads a content that is a list of parts."""
        return {"type", "text"} <= self.names

    @property
    def thoughts(self) -> bool:
        """True if the template reads a thought of an assistant's turn."""
        return not self.names.isdisjoint(THOUGHTS)


def says_nothing(value: Any) -> bool:
    """Return whether a value is null or empty, which column files write for missing keys."""
    return value is None or (isinstance(value, (str, list, tuple, dict)) and not value)


def is_unread(where: str, key: str, value: Any) -> bool:
    """Return whether to report a key that nothing reads.

    Raises DataError: it holds pictures, a thought or a preference, or marks what is learned.
    """
    if says_nothing(value):
        return False
    refuse_pictures(where, key, value)
    if key in _PREFERENCES or (key == "label" and isinstance(value, bool)):
        raise DataError(
            f"{where} has {key}, a key of preference data, and training here is on one answer; "
            'write the preferred one as a turn of "messages" and leave the rest out'
        )
    if key in _CONTENT:
        raise DataError(
            f"{where} has {key}, which the chat template does not name, so that it would be lost; "
            "give a template that writes it, or leave it or the conversation out"
        )
    if key in HARMLESS:
        return False
    if _MARK_LIKE.fullmatch(key):
        raise DataError(
            f"{where} has {key}, which may say what is learned and is not read; mark whole turns "
            'of the assistant with "train": false, or remove it'
        )
    if _THOUGHT_LIKE.fullmatch(key) and isinstance(value, (str, list, dict)):
        raise DataError(
            f"{where} has {key}, a thought that the chat template does not name, so that it would "
            "be lost; give a template that writes it, or leave it or the conversation out"
        )
    return key in _LINKS or not _HARMLESS_ENDS.fullmatch(key)


def refuse_pictures(where: str, key: str, value: Any) -> None:
    """Raise DataError for a key of pictures, sound or video that holds some."""
    if value and _PICTURES.fullmatch(key):  # a number of 0 pictures is no harm
        raise DataError(
            f"{where} has {key}, and pictures, sound and video are not read; "
            "leave the conversation out"
        )


def mark_of(where: str, contents: Mapping[str, Any]) -> bool | None:
    """Return the mark of a row or a turn: True if it is learned, None without marks.

    Raises DataError: a mark that is neither true nor false, 1 nor 0, or two that contradict each
    other.
    """
    marks: dict[str, bool] = {}
    for key in (*MARKS, MASKED):
        value = contents.get(key)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise DataError(
                f"{where} has {key} {value!r:.40}, and a turn is learned or not: true or 1, "
                "false or 0; give one of these, or remove it"
            )
        marks[key] = bool(value) != (key == MASKED)
    if len(set(marks.values())) > 1:
        names = " and ".join(f"{key} {contents[key]!r}" for key in marks)
        raise DataError(f"{where} has {names}, which contradict each other; leave one out")
    return next(iter(marks.values()), None)
