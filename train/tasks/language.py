"""Language models on text, trained on sequences sharded over context-parallel ranks."""

from functools import partial
from typing import Any

import torch
from torch import nn

from data.text.blend import MockTokenizer
from data.text.megatron import build_datasets
from data.tokenizer import Tokenizer, load_tokenizer
from model.registry import (
    attention_title,
    build_model,
    flops_per_token,
    num_parameters,
    num_trained,
)
from runtime.together import is_first, raise_together
from train.callbacks.ruler import Curve
from train.config import language
from train.config.entries import Config
from train.context_attention import context_of, plan_ahead
from train.objectives.language import NextToken, corpus_entropy
from train.tasks.task import Data, Task


class LanguageTask(Task[Config]):
    """Pretraining and finetuning of a language model."""

    entry = "pretrain_gpt.py"
    data_writer = "tools.prepare_data"
    data_flags = ("--data-path PREFIX", "--tokenizer-model FILE")
    parse_args = staticmethod(language.parse_args)
    validate = staticmethod(language.validate)
    objective: NextToken

    def set_up(self) -> None:
        """Set up context parallelism, the attention and the loss; collective."""
        config = self.config
        with raise_together():
            self.cp, self._attend = context_of(config, self.mesh.cp.get_group())
        self.objective = NextToken(
            self.cp,
            self.mesh.device,
            config.recompute.loss_chunk_size,
            reset_position_ids=config.data.reset_position_ids,
            reset_attention_mask=config.data.reset_attention_mask,
            prepare=partial(plan_ahead, config, self._attend),
        )

    @staticmethod
    def load_tokenizer(config: Config) -> Tokenizer | MockTokenizer:
        """Load the data's tokenizer; for mock_data return a mock one of vocab_size entries.

        Raises DataError if the tokenizer is missing.
        """
        if config.data.mock_data:
            return MockTokenizer(config.model.vocabulary)
        return load_tokenizer(str(config.data.tokenizer_model))

    def build_model(self) -> nn.Module:
        """Build the whole model; with bf16, the weights that adapters freeze are in 16 bits."""
        model = build_model(self.config.model, self._attend)
        if self.config.model.lora_rank is not None and self.config.train.bf16:
            # No update is added to frozen weights, so 16 bits lose nothing.
            model.cast(torch.bfloat16, frozen=True)
        return model

    def load_data(self, tokenizer: Any) -> Data:
        """Open the text, and make the examples of RULER's curve; collective."""
        config = self.config
        train, valid, _ = build_datasets(
            config.data,
            config.train.seq_length,
            config.train.seed,
            tokenizer,
            config.model.vocab_size,
        )
        curve = None
        with raise_together():
            if config.ruler.ruler_interval:
                curve = Curve(config, self.objective, self.mesh, tokenizer)
        constants = corpus_entropy(config.data) if is_first() else {}
        return Data(train, valid if config.train.eval_iters else None, constants, curve)

    def flops_per_token(self, length: int) -> float:
        """Return the training FLOPs per token of a document of this length."""
        return flops_per_token(self.config.model, length)

    def description(self, data: Data) -> str:
        """Describe the run in one line: the model, the mesh and the data."""
        config = self.config
        model = config.model
        title = f"{model.title} of {num_parameters(model):,} parameters"
        if model.lora_rank is not None:
            title += (
                f", of which {num_trained(model):,} in adapters of rank {model.lora_rank} "
                "are trained"
            )
        attention = attention_title(model)
        if attention is not None:
            title += f", {attention}"

        method = config.context.title
        if model.linear_attention and self.mesh.cp.size() == 1:
            method = "linear attention"
        elif model.own_softmax_layout:
            hybrid = config.hybrid
            method += (
                f", softmax layers by {hybrid.hybrid_softmax_method}, "
                f"{hybrid.hybrid_softmax_layout}"
            )
        schedule = config.context.delta_rule_schedule
        if config.delta and self.mesh.cp.size() > 1 and schedule != "auto":
            method += f", states of the delta rule by {schedule}"

        samples: Any = data.train
        drawn = "drawn " if config.data.mock_data else ""
        packing = config.data.packing
        if config.data.pack_documents:
            packing += f", cut only if too long, {1 - samples.fill:.2%} padding"
        if config.data.blend_by_length:
            packing += f", of documents of {config.data.length_blend}"
        return self._summary(
            title, method, f"sequences of {config.train.seq_length} {drawn}tokens{packing}"
        )
