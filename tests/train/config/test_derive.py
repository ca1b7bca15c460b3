"""The vocabulary that a run takes from its tokenizer."""

from dataclasses import replace

import pytest

from model.config import ModelConfig
from tests.planner.test_search import config
from train.config.derive import with_vocabulary
from train.config.flags import ConfigError


def test_the_vocabulary_is_the_tokenizers_unless_a_larger_one_is_named():
    unset = replace(config(1), model=ModelConfig())
    assert with_vocabulary(unset, 300).model.vocab_size == 300
    assert with_vocabulary(config(1), 300) == config(1)
    with pytest.raises(ConfigError, match="vocab_size is 512 and the tokenizer has 513 entries"):
        with_vocabulary(config(1), 513)
