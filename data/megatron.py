"""Adapter of megatron.core.datasets: indexed token files to training samples."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    data_path: tuple[str, ...] = ()
    """Prefix of a Megatron .bin/.idx pair, or a blend: weight prefix weight prefix ..."""
    split: str = "95,5,0"
    """Shares of the documents for training, validation and test."""
    tokenizer_model: str | None = None
    """Tokenizer file: a sentencepiece .model or a Hugging Face tokenizer.json."""
    data_cache_path: str | None = None
    """Folder for the sample indices; by default beside the data."""
    eod_mask_loss: bool = False
    """Leave the loss of end-of-document tokens out."""
    num_workers: int = 0
    """Processes that read batches ahead; 0 reads in the training process."""
