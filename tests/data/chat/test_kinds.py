"""Each kind of row that people have is right, told or refused, as docs/reference/data_kinds.md says."""

import json
import re

import pytest

from data.chat.convert import Chat
from data.chat.rows import conversation_of
from data.chat.template import load_template
from data.text.prepare import prepare
from data.text.record import Request
from data.tokenizer import load_tokenizer
from runtime.errors import DataError
from tests.data.chat.rich import RICH, theirs, write_folder
from tests.data.chat.templates import TEMPLATES
from tests.data.kinds import check_page

U, A = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
END = "<|im_end|>"
CHAT = [U, A]
TWICE = [U, A, U, {"role": "assistant", "content": "Again."}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALLED = [U, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "Sunny"}, A]
SPOKEN = '<call>weather {"city": "Rome"}</call>' + END + "Hello!" + END
DOCUMENTS = [{"title": "a", "text": "b"}]


def marked(**mark):
    return {"messages": [U, A | mark, U, {"role": "assistant", "content": "Again."}]}


def with_turn(number, **more):
    return {"messages": [turn | more if place == number else turn for place, turn in enumerate(CHAT)]}


def same(row, kwargs=(), turns=None, **more):
    """A row that is right: what is learned of it, and how transformers is asked for the same ids."""
    return row, turns, dict(kwargs), more.get("learned", "Hello!" + END)


CHATML, NAMES = TEMPLATES["chatml"], RICH
RIGHT = {
    "ShareGPT's conversations": (
        CHATML,
        same({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}, turns=CHAT),
    ),
    "OpenAI's messages": (CHATML, same({"messages": CHAT})),
    "a list of turns": (CHATML, same(CHAT, turns=CHAT)),
    "id, source, score, language": (
        CHATML,
        same({"id": 3, "source": "web", "score": 0.5, "language": "en", "messages": CHAT}),
    ),
    "prompt that repeats the first question": (CHATML, same({"prompt": "Hi", "prompt_id": "x", "messages": CHAT})),
    "null and empty keys of another kind of row": (
        CHATML,
        same({"messages": CHAT, "tools": None, "images": [], "chosen": None}),
    ),
    "roles of Gemini, model": (CHATML, same({"messages": [U, A | {"role": "model"}]}, turns=CHAT)),
    "content in parts of text": (CHATML, same(with_turn(0, content=[{"type": "text", "text": "Hi"}]), turns=CHAT)),
    "parts of text with null and harmless keys": (
        CHATML,
        same(with_turn(0, content=[{"type": "text", "text": "Hi", "image": None, "id": 3, "train": True}]), turns=CHAT),
    ),
    "system text beside the turns": (
        CHATML,
        same({"system": "Be brief.", "messages": CHAT}, turns=[{"role": "system", "content": "Be brief."}, *CHAT]),
    ),
    "train false on a turn": (CHATML, same(marked(train=False), turns=TWICE, learned="Again." + END)),
    "loss false on a turn": (CHATML, same(marked(loss=False), turns=TWICE, learned="Again." + END)),
    "loss 0 on a turn": (CHATML, same(marked(loss=0), turns=TWICE, learned="Again." + END)),
    "weight 0 on a turn": (CHATML, same(marked(weight=0), turns=TWICE, learned="Again." + END)),
    "loss_weight 0.0 on a turn": (CHATML, same(marked(loss_weight=0.0), turns=TWICE, learned="Again." + END)),
    "loss_mask 0 on a turn": (CHATML, same(marked(loss_mask=0), turns=TWICE, learned="Again." + END)),
    "masked true on a turn": (CHATML, same(marked(masked=True), turns=TWICE, learned="Again." + END)),
    "train true on a turn": (CHATML, same(marked(train=True), turns=TWICE, learned="Hello!" + END + "Again." + END)),
    "train null on a turn": (CHATML, same(marked(train=None), turns=TWICE, learned="Hello!" + END + "Again." + END)),
    "a mark on a user's turn that it is not learned": (CHATML, same(with_turn(0, train=False), turns=CHAT)),
    "thinking beside the content": (
        NAMES,
        same(with_turn(1, thinking="Greet."), learned="<think>Greet.</think>Hello!" + END),
    ),
    "reasoning_content beside the content": (
        NAMES,
        same(with_turn(1, reasoning_content="Greet."), learned="<think>Greet.</think>Hello!" + END),
    ),
    "reasoning beside the content": (
        NAMES,
        same(with_turn(1, reasoning="Greet."), learned="<think>Greet.</think>Hello!" + END),
    ),
    "name of a turn that the template writes": (NAMES, same(with_turn(0, name="Ann"))),
    "chat_template_kwargs": (
        NAMES,
        same({"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ),
    "a variable of the template as a key of the row": (
        NAMES,
        same({"messages": CHAT, "enable_thinking": True}, {"enable_thinking": True}),
    ),
    "documents": (NAMES, same({"messages": CHAT, "documents": DOCUMENTS}, {"documents": DOCUMENTS})),
    "tools that are not called": (NAMES, same({"messages": CHAT, "tools": [TOOL]}, {"tools": [TOOL]})),
    "tools as JSON": (NAMES, same({"messages": CHAT, "tools": json.dumps([TOOL])}, {"tools": [TOOL]})),
    "tool_calls with an object of arguments": (
        NAMES,
        same({"messages": CALLED, "tools": [TOOL]}, {"tools": [TOOL]}, learned=SPOKEN),
    ),
    "tool_calls with the JSON of arguments": (
        NAMES,
        same(
            {
                "messages": [
                    U,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [CALL | {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
                    },
                    *CALLED[2:],
                ]
            },
            learned=SPOKEN,
        ),
    ),
    "tool_call_id that the template writes": (
        NAMES,
        same({"messages": [*CALLED[:2], CALLED[2] | {"tool_call_id": "c1"}, A]}, learned=SPOKEN),
    ),
    "a tool that answers nothing": (
        NAMES,
        same({"messages": [*CALLED[:2], {"role": "tool", "content": ""}, A]}, learned=SPOKEN),
    ),
    "functions and function_call, OpenAI's older ones": (
        NAMES,
        same(
            {
                "functions": [TOOL["function"]],
                "messages": [
                    U,
                    {
                        "role": "assistant",
                        "content": None,
                        "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'},
                    },
                    {"role": "function", "content": "Sunny"},
                    A,
                ],
            },
            {"tools": [TOOL]},
            CALLED,
            learned=SPOKEN,
        ),
    ),
    "function_call and observation, ShareGPT's roles": (
        NAMES,
        same(
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
                    {"from": "observation", "value": "Sunny"},
                    {"from": "gpt", "value": "Hello!"},
                ]
            },
            turns=CALLED,
            learned=SPOKEN,
        ),
    ),
    "tool_call twice in a row, ms-swift's": (
        NAMES,
        same(
            {
                "messages": [
                    U,
                    {"role": "tool_call", "content": json.dumps(CALL["function"])},
                    {"role": "tool_call", "content": json.dumps(CALL["function"])},
                    {"role": "tool_response", "content": "Sunny"},
                    A,
                ],
                "tools": "null",
            },
            turns=[U, {"role": "assistant", "tool_calls": [CALL, CALL]}, *CALLED[2:]],
            learned=SPOKEN.replace("</call>", '</call><call>weather {"city": "Rome"}</call>'),
        ),
    ),
}
TOLD = {
    "name of a turn that the template does not write": (CHATML, with_turn(0, name="Ann"), "a turn's name"),
    "tool_call_id that the template does not write": (CHATML, with_turn(0, tool_call_id="c1"), "a turn's tool_call_id"),
    "a key of the row that is not known": (CHATML, {"messages": CHAT, "persona": "a poet"}, "the row's persona"),
    "a key of a turn that is not known": (CHATML, with_turn(1, mood="glad"), "a turn's mood"),
    "a variable that the template does not name": (
        CHATML,
        {"messages": CHAT, "enable_thinking": True},
        "enable_thinking",
    ),
    "chat_template_kwargs that the template does not name": (
        CHATML,
        {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs enable_thinking",
    ),
    "a date of today that the template can do without": (
        "{% if dated %}{{ strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' }}{% endif %}"
        + CHATML,
        {"messages": CHAT, "dated": True},
        "the day of today (strftime_now)",
    ),
    "null arguments, as Parquet has for another call's": (
        RICH,
        {"messages": [U, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}]},
        "nulls in tools or tool_calls",
    ),
    "arguments as JSON that the template quotes once more": (
        RICH.replace("is string %}{{ call.function.arguments }}", "is string %}{{ call.function.arguments | tojson }}"),
        RIGHT["tool_calls with the JSON of arguments"][1][0],
        "arguments of tool_calls",
    ),
}
REFUSED = {
    "train on a user's turn": (CHATML, with_turn(0, train=True), r"turn 1 \(user\) is marked as learned"),
    "weight 0.5 on a turn": (CHATML, marked(weight=0.5), "turn 2 has weight 0.5"),
    "loss as a text": (CHATML, marked(loss="no"), "turn 2 has loss 'no'"),
    "two marks that contradict each other": (CHATML, marked(train=True, weight=0), "train True and weight 0"),
    "every answer marked as not learned": (CHATML, with_turn(1, train=False), "every turn of the assistant is marked"),
    "a row marked as not learned": (CHATML, {"messages": CHAT, "weight": 0}, "every turn of the assistant is marked"),
    "train_detail, spans of a turn": (CHATML, marked(train_detail=[{"begin_offset": 0}]), "turn 2 has train_detail"),
    "mask, a role of NeMo's": (CHATML, {"messages": CHAT, "mask": "User"}, "it has mask"),
    "thinking that the template does not write": (CHATML, with_turn(1, thinking="Greet."), "turn 2 has thinking"),
    "reasoning_content that the template does not write": (
        CHATML,
        with_turn(1, reasoning_content="x"),
        "turn 2 has reasoning_content",
    ),
    "a thought under another name": (CHATML, with_turn(1, chain_of_thought="x"), "turn 2 has chain_of_thought"),
    "image beside a placeholder": (
        CHATML,
        {"image": "a.png", "messages": [U | {"content": "<image>\nWhat?"}, A]},
        "it has image",
    ),
    "images of a turn": (CHATML, with_turn(0, images=["a.png"]), "turn 1 has images"),
    "videos": (CHATML, {"messages": CHAT, "videos": ["a.mp4"]}, "it has videos"),
    "audio_path": (CHATML, {"messages": CHAT, "audio_path": "a.wav"}, "it has audio_path"),
    "a part that is a picture": (
        CHATML,
        with_turn(0, content=[{"type": "image_url", "image_url": {}}]),
        "turn 1 has a part .*image_url",
    ),
    "a part of text with a picture": (
        CHATML,
        with_turn(0, content=[{"type": "text", "text": "Hi", "image": "a.png"}]),
        "turn 1 has image",
    ),
    "a part of text that is marked as not learned": (
        CHATML,
        with_turn(1, content=[{"type": "text", "text": "Hel", "train": False}, {"type": "text", "text": "lo!"}]),
        "turn 2 has a part with train",
    ),
    "a key of a part of text that is not known": (
        CHATML,
        with_turn(1, content=[{"type": "text", "text": "Hello!", "mood": "glad"}]),
        "turn 2 has a part with mood",
    ),
    "tools that the template does not write": (CHATML, {"messages": CHAT, "tools": [TOOL]}, "it has tools"),
    "a date of today that the template must be given": (
        "{% if dated %}{{ strftime_now('%Y-%m-%d') }}{% endif %}" + CHATML,
        {"messages": CHAT, "dated": True},
        "strftime_now.*on which prepared data must not depend",
    ),
    "documents that the template does not write": (
        CHATML,
        {"messages": CHAT, "documents": DOCUMENTS},
        "it has documents",
    ),
    "tool_calls that the template does not write": (
        TEMPLATES["llama 3"].replace("message['content']", "(message['content'] or '')"),
        {"messages": CALLED},
        "drops the tool_calls of turn 2",
    ),
    "tool_calls without a name": (
        NAMES,
        {"messages": [U, A | {"tool_calls": [{"function": {}}]}]},
        "turn 2 has tool_calls",
    ),
    "function_call that is not JSON": (
        NAMES,
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "weather(Rome)"}]},
        "turn 2 is a call",
    ),
    "chat_template_kwargs with an argument of transformers": (
        NAMES,
        {"messages": CHAT, "chat_template_kwargs": {"add_generation_prompt": True}},
        "add_generation_prompt",
    ),
    "messages and other conversations": (
        CHATML,
        {"messages": CHAT, "conversations": TWICE},
        "messages and conversations",
    ),
    "two texts of the system": (
        CHATML,
        {"system": "a", "messages": [{"role": "system", "content": "b"}, *CHAT]},
        "system",
    ),
    "content and another value": (CHATML, with_turn(0, value="Ho"), "content and value"),
    "chosen and rejected": (CHATML, {"chosen": CHAT, "rejected": CHAT}, "pair of preferences"),
    "rejected_response beside the turns": (
        CHATML,
        {"messages": CHAT, "rejected_response": "No."},
        "it has rejected_response",
    ),
    "label of KTO": (CHATML, {"messages": CHAT, "label": False}, "it has label"),
    "instruction and output": (
        CHATML,
        {"instruction": "Hi", "input": "", "output": "Hello!"},
        "instruction and its answer",
    ),
    "prompt and completion": (CHATML, {"prompt": [U], "completion": [A]}, "prompt and its completion"),
    "prompt of turns and a response, verl's": (CHATML, {"prompt": [U], "response": "Hello!"}, "is a list of turns"),
    "an answer under another key": (
        CHATML,
        {"messages": [U, {"role": "assistant", "content": None, "refusal": "No."}]},
        r"turn 2 \(assistant\) is empty \(it has refusal\)",
    ),
    "tool_calls in a row of which one is not learned": (
        NAMES,
        {
            "messages": [
                U,
                {"role": "tool_call", "content": json.dumps(CALL["function"]), "loss": False},
                {"role": "tool_call", "content": json.dumps(CALL["function"])},
            ]
        },
        "turn 3 is a call beside",
    ),
    "text": (CHATML, {"text": "Hi"}, "prepare it without --chat"),
    "an answer that is empty": (CHATML, with_turn(1, content=""), r"turn 2 \(assistant\) is empty"),
    "values nested a hundred deep": (
        NAMES,
        {"messages": CHAT, "documents": [json.loads('{"a":' * 100 + "1" + "}" * 100)]},
        "levels deep",
    ),
}
KINDS = [
    *((kind, "right") for kind in RIGHT),
    *((kind, "told") for kind in TOLD),
    *((kind, "refused") for kind in REFUSED),
]


def loaded(folder, source):
    path = write_folder(folder, source)
    return path, load_tokenizer(path), load_template(path)


def test_the_page_lists_these_kinds():
    assert len(KINDS) >= 60
    check_page("Conversations", KINDS)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_kind_that_is_right_has_the_ids_of_transformers(kind, tmp_path):
    source, (row, turns, kwargs, said) = RIGHT[kind]
    path, tokenizer, template = loaded(tmp_path, source)
    encoded = template.encode(tokenizer, conversation_of(row, template.reads))
    messages = turns or row["messages"]
    want = theirs(path).apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)
    assert encoded.ids.tolist() == want["input_ids"]
    assert tokenizer.detokenize(encoded.ids[encoded.learned].tolist(), special=True) == said
    assert encoded.told == ()
    assert set(encoded.ends) == {tokenizer.tokenize_special(END)[0][0]}


def prepared(folder, source, rows, **chat):
    path = write_folder(folder / "tokenizer", source)
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = Request(
        inputs=(str(folder / "in.jsonl"),), vocab_size=None, tokenizer_model=path, chat=Chat(seq_length=400, **chat)
    )
    return prepare(request, folder / "out" / "d", progress=False)[0]


@pytest.mark.parametrize("kind", TOLD)
def test_a_kind_that_is_told_is_counted_and_refused_if_strict(kind, tmp_path):
    source, row, key = TOLD[kind]
    facts = prepared(tmp_path, source, [row, row, {"messages": CHAT}])
    assert [(key in name, count) for name, count in facts.unread.items() if key in name] == [(True, 2)]
    with pytest.raises(DataError, match=rf"line 1: .*{re.escape(key)}"):
        prepared(tmp_path / "strict", source, [row], strict=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_kind_that_is_refused_is_named(kind, tmp_path):
    source, row, message = REFUSED[kind]
    with pytest.raises(DataError, match=rf"in\.jsonl, line 2: .*{message}"):
        prepared(tmp_path, source, [{"messages": CHAT}, row])
    assert not (tmp_path / "out").exists()
