import pytest

from data.chat.template import load_template
from data.tokenizer import load_tokenizer
from tests.data.chat.templates import TEMPLATES, write_tokenizer
from tools.ruler.prompts import Prompts


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(
        write_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["chatml"])
    )


@pytest.fixture(scope="session")
def chat(tokenizer):
    """Prompts by the tokenizer's chat template."""
    return Prompts(tokenizer, load_template(tokenizer.path))
