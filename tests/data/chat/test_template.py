"""Ids are those of transformers, and what is learned is as written by hand.

Inexact ones are refused.
"""

import json
import resource
import signal

import pytest

from data.chat.template import load_template
from data.tokenizer import load_tokenizer
from runtime import bounds
from runtime.bounds import UnboundedError, bounded
from runtime.errors import DataError
from tests.data.chat.templates import BY_HAND, MARKED, TEMPLATES, TURNS, write_tokenizer

ALL = TEMPLATES | {"marked": MARKED}


def loaded(folder, template, **options):
    path = write_tokenizer(folder, template, **options)
    tokenizer = load_tokenizer(path)
    return tokenizer, load_template(path)


@pytest.mark.parametrize("name", ALL)
def test_what_is_learned_is_as_written_by_hand(name, tmp_path):
    tokenizer, template = loaded(tmp_path, ALL[name])
    ids, learned = template.tokenize(tokenizer, TURNS)
    pieces = [
        (tokenizer.tokenize_special(text)[0], mask)
        for text, mask in BY_HAND.get(name, BY_HAND["chatml"])
    ]
    assert ids.tolist() == [i for piece, _ in pieces for i in piece]
    assert learned.tolist() == [mask == 1 for piece, mask in pieces for _ in piece]


def test_ids_are_those_of_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    marks = {
        "role": "assistant",
        "content": "\ufdd1 \ufdd0\ufdd2 0 \ufdd3",
    }  # characters that mark places of a text
    turns = [
        *TURNS[:1],
        {"role": "assistant", "content": "Straße, ▁ 日本\n\n  x  "},
        TURNS[2],
        marks,
    ]
    for name, source in ALL.items():
        tokenizer, template = loaded(tmp_path / name.replace(" ", ""), source)
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        theirs = PreTrainedTokenizerFast(
            tokenizer_file=tokenizer.path, chat_template=source, **names
        )
        for conversation in (TURNS, turns):
            marks = name == "marked"
            want = theirs.apply_chat_template(
                conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=marks
            )
            ids, learned = template.tokenize(tokenizer, conversation)
            assert ids.tolist() == want["input_ids"], name
            if marks:
                assert learned.tolist() == [mask == 1 for mask in want["assistant_masks"]]


def test_where_a_template_is_found(tmp_path):
    path = write_tokenizer(tmp_path, None)
    with pytest.raises(DataError, match="has no chat template"):
        load_template(path)
    assert load_template(path, "chatml").source == TEMPLATES["chatml"]
    with pytest.raises(DataError, match=r"lacks <\|begin_of_text\|>, .* llama3"):
        load_template(path, "llama3")
    named = [
        {"name": "tools", "template": "tools"},
        {"name": "default", "template": "of the configuration"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "chat_template": named})
    )
    assert load_template(path).source == "of the configuration"
    assert load_template(path).tokens == (("bos_token", "<s>"),)
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert load_template(path).source == "beside"
    (tmp_path / "mine").write_text("given")
    assert load_template(path, str(tmp_path / "mine")).source == "given"
    with pytest.raises(DataError, match=r"cannot read the chat template .*none"):
        load_template(path, str(tmp_path / "none"))
    (tmp_path / "mine").write_text("{% for %}")
    with pytest.raises(DataError, match=r"mine is not valid jinja2 .*repair the template"):
        load_template(path, str(tmp_path / "mine"))
    (tmp_path / "mine").write_text("long" * 1_000_000)
    with pytest.raises(DataError, match=r"mine has more than 2,097,152 characters; give another"):
        load_template(path, str(tmp_path / "mine"))
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        load_template(str(tmp_path / "t.model"))


SILENT = ("{{ sep_token }}", "{{ 'x' ~ sep_token }}", "{% set y = sep_token %}{{ y }}")
HARMLESS = (
    "{{ unk_token }}",
    "{% if sep_token %}{{ sep_token }}{% endif %}",
    "{{ messages[0].x }}",
)


@pytest.mark.parametrize("source", [*SILENT, *HARMLESS])
def test_a_special_token_that_has_no_text_is_refused_if_it_would_be_left_out(source, tmp_path):
    tokenizer, template = loaded(tmp_path, TEMPLATES["chatml"] + source)
    if source in HARMLESS:
        assert template.tokenize(tokenizer, TURNS)[1].any()
        return
    with pytest.raises(DataError, match=r"sep_token, which tokenizer_config\.json does not define"):
        template.tokenize(tokenizer, TURNS)


def test_a_special_token_that_special_tokens_map_alone_names_is_read_as_transformers_reads_it(
    tmp_path,
):
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"sep_token": "<|user|>"}))
    tokenizer, template = loaded(tmp_path, "{{ sep_token }}" + TEMPLATES["chatml"])
    ids, _ = template.tokenize(tokenizer, TURNS)
    assert ids[0] == tokenizer.tokenize_special("<|user|>")[0][0]


LAST_USER = (
    "{% for m in messages %}{% if not loop.last or m['role'] == 'user' %}{{ "
    "m['content'] }}{% "
    "endif %}{% endfor %}"
)
SHORT = "{% for m in messages %}{{ '<s>' + m['content'][:3] + '</s>' }}{% endfor %}"
ONE_MARK = TEMPLATES["chatml"].replace("{% for", "{% generation %}{% endgeneration %}{% for", 1)
REORDERED = "{{ messages | length }}{% for m in messages %}{{ m['content'] + '</s>' }}{% endfor %}"
SPACED = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LAST_USER, r"drops turn 4 \(assistant\)"),
        (SHORT, r"changes turn 2 \(assistant\)"),
        ("{{ messages[7]['content'].x.y }}", "fails .*UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "fails .*SecurityError"),
        (
            TEMPLATES["mistral"].replace("== 'user') != ", "== 'user') == "),
            "fails .*must alternate",
        ),
        (REORDERED, "does not say exactly"),
    ],
)
def test_what_is_not_exact_is_refused(source, message, tmp_path):
    tokenizer, template = loaded(tmp_path, source)
    with pytest.raises(DataError, match=message):
        template.tokenize(tokenizer, TURNS)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set n = namespace(x='xx') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% "
    "endfor "
    "%}{{ n.x }}"
)
UNBOUNDED = {
    "endless": (ENDLESS, "does not finish within"),
    "endless power": ("{{ 7 ** 999999999 }}", "does not finish within"),
    "endless compilation": (
        "{{ " + "1 + " * 100_000 + "1 }}",
        "does not finish within|is not valid jinja2",
    ),
    "doubled": (DOUBLED, "takes more than 128 MiB|does not finish within"),
    "padded": ("{{ messages[0]['content'].center(9999999999) }}", "takes more than 128 MiB"),
    "padded constant": ("{{ 'x' | center(9999999999) }}", "takes more than 128 MiB"),
    "long": ("{{ messages[0]['role'] * 20000000 }}", "writes 80,000,000 characters"),
}
NESTED = {
    "brackets": "{{ " + "[" * 500_000 + "]" * 500_000 + " }}",
    "ifs": "{% if messages %}" * 50_000 + "{% endif %}" * 50_000,
    "loops": "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
    "macros": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_template_that_does_not_end_or_grows_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_SECONDS", 0.3 if "finish" in UNBOUNDED[name][1][:15] else 10)
    monkeypatch.setattr(bounds, "MAX_BYTES", 1 << 27 if name != "long" else 1 << 30)
    source, message = UNBOUNDED[name]
    with pytest.raises(
        UnboundedError if "jinja2" not in message else DataError,
        match=rf"_config\.json ({message})",
    ):
        loaded(tmp_path, source)[1].render(TURNS)


def test_bounds_end_with_the_call():
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    with pytest.raises(ZeroDivisionError):
        bounded("a program", lambda: 1 // 0)
    assert bounded("a program", lambda: resource.getrlimit(resource.RLIMIT_AS)[0]) > 0
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


@pytest.mark.parametrize("name", NESTED)
def test_a_template_that_is_nested_too_deeply_is_refused(name, tmp_path):
    with pytest.raises(
        DataError, match=r"_config\.json (is not valid jinja2|fails) \([^\n]*\); repair"
    ):
        loaded(tmp_path, NESTED[name])[1].render(TURNS)


def test_marks_that_the_template_cuts_are_not_taken(tmp_path):
    """Without the marks it would write another text, or they would stand alone.

    The prefixes hold instead.
    """
    cut = "{% set x %}{% generation %} abc{% endgeneration %}{% endset %}{{ x"
    for end in ("[2:] }}", "[:2] }}", " | trim }}"):
        tokenizer, template = loaded(tmp_path, cut + end + TEMPLATES["chatml"])
        assert template.tokenize(tokenizer, TURNS)[1].sum() == len("Hello!4") + 2


def test_text_of_all_characters_that_mark_places_is_refused(tmp_path):
    tokenizer, template = loaded(tmp_path, TEMPLATES["chatml"])
    turns = [TURNS[0], {"role": "assistant", "content": "".join(map(chr, range(0xFDD0, 0xFDF0)))}]
    with pytest.raises(DataError, match="nearly all noncharacters of Unicode, from U"):
        template.tokenize(tokenizer, turns)


def test_a_token_across_the_edge_of_a_turn_is_refused(tmp_path):
    tokenizer, template = loaded(tmp_path / "a", SPACED)
    assert template.tokenize(tokenizer, TURNS)[1].sum() == len("Hello!4") + 2
    tokenizer, template = loaded(tmp_path / "b", SPACED, merges=(("Ġ", "H"),))
    with pytest.raises(
        DataError, match="one token covers ' H', which crosses the edge of an assistant's turn"
    ):
        template.tokenize(tokenizer, TURNS)
    marked = SPACED.replace(
        "+ m['content'] + '</s>' }}",
        "}}{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}",
    )
    tokenizer, template = loaded(
        tmp_path / "c", marked
    )  # around the user's turns too: the prefixes hold instead
    assert template.tokenize(tokenizer, TURNS)[1].sum() == len("Hello!4") + 2
    tokenizer, template = loaded(tmp_path / "d", ONE_MARK)
    assert template.tokenize(tokenizer, TURNS)[1].sum() == len("Hello!4") + 2
