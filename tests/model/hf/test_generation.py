"""Greedy texts are those of transformers, which reads each prompt alone."""

import pytest
import torch

from tests.model.generation import generate
from tests.model.hf.hugging_face import CONFIGS, hugging_face, ours

PROMPTS = [
    torch.randint(61, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (9, 3, 17)
]
NEW = 25  # past the window of 8 and, after the longest prompt, within GPT-2's 50 positions


@pytest.mark.parametrize(
    "name", ["llama", "llama, llama3", "mistral", "ministral", "qwen2, tied, a window", "qwen2, yarn", "qwen3", "gpt2"]
)
def test_greedy_texts_equal_transformers(name):
    theirs = hugging_face(CONFIGS[name], torch.float64).eval()
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = [
        theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)[0].tolist()
        for prompt in PROMPTS
    ]
    found = generate(ours(theirs, CONFIGS[name], torch.float64), PROMPTS, NEW)
    assert found == [text[len(prompt) :] for prompt, text in zip(PROMPTS, wanted, strict=True)]
    assert len({tuple(text[-5:]) for text in found}) == len(PROMPTS)  # no loop that all end in
