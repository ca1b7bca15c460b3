"""Each kind of row that people have is right, told or refused.

The page docs/reference/data_kinds.md says which.

``kinds.jsonl`` has a row of each kind: what is learned of it and what transformers is asked for, or
what the note or the refusal names.
"""

import json
import re
from pathlib import Path

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

END = "<|im_end|>"
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
CHATML, ARGUMENTS = TEMPLATES["chatml"], "is string %}{{ call.function.arguments"
OPTIONAL_DAY = "strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024'"
SOURCES = {
    "chatml": CHATML,
    "rich": RICH,
    "quoting": RICH.replace(f"{ARGUMENTS} }}}}", f"{ARGUMENTS} | tojson }}}}"),
    "dated": f"{{% if dated %}}{{{{ {OPTIONAL_DAY} }}}}{{% endif %}}{CHATML}",
    "today": f"{{% if dated %}}{{{{ strftime_now('%Y-%m-%d') }}}}{{% endif %}}{CHATML}",
    "llama 3, no tools": TEMPLATES["llama 3"].replace(
        "message['content']", "(message['content'] or '')"
    ),
}
LINES = Path(__file__).with_name("kinds.jsonl").read_text(encoding="utf-8").splitlines()
KINDS = [json.loads(line) for line in LINES]


def of_result(result):
    cases = [case for case in KINDS if case["result"] == result]
    return pytest.mark.parametrize("case", cases, ids=[case["kind"] for case in cases])


def test_the_page_lists_these_kinds():
    assert len(KINDS) >= 60
    check_page("Conversations", [(case["kind"], case["result"]) for case in KINDS])


@of_result("right")
def test_a_kind_that_is_right_has_the_ids_of_transformers(case, tmp_path):
    path, row = write_folder(tmp_path, SOURCES[case["template"]]), case["row"]
    tokenizer, template = load_tokenizer(path), load_template(path)
    encoded = template.encode(tokenizer, conversation_of(row, template.reads))
    messages = case.get("turns") or row["messages"]
    want = theirs(path).apply_chat_template(
        messages, tokenize=True, return_dict=True, **case.get("kwargs", {})
    )
    assert encoded.ids.tolist() == want["input_ids"]
    learned = encoded.ids[encoded.learned].tolist()
    assert tokenizer.detokenize(learned, special=True) == case["learned"]
    assert encoded.notes == ()
    assert set(encoded.ends) == {tokenizer.tokenize_special(END)[0][0]}


def prepared(folder, case, rows, **chat):
    path = write_folder(folder / "tokenizer", SOURCES[case["template"]])
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = Chat(seq_length=400, **chat)
    request = Request(inputs=(str(source),), vocab_size=None, tokenizer_model=path, chat=chat)
    return prepare(request, folder / "out" / "d", progress=False)[0]


@of_result("told")
def test_a_kind_that_is_told_is_counted_and_refused_if_strict(case, tmp_path):
    row, key = case["row"], case["says"]
    facts = prepared(tmp_path, case, [row, row, CHAT])
    assert [count for name, count in facts.unread.items() if key in name] == [2]
    with pytest.raises(DataError, match=rf"line 1: .*{re.escape(key)}"):
        prepared(tmp_path / "strict", case, [row], strict=True)


@of_result("refused")
def test_a_kind_that_is_refused_is_named(case, tmp_path):
    with pytest.raises(DataError, match=rf"in\.jsonl, line 2: .*{case['says']}"):
        prepared(tmp_path, case, [CHAT, case["row"]])
    assert not (tmp_path / "out").exists()
