"""Batches of tokens from megatron-core's data sets, in the same order for every placement."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import normalize

from megatron_zb.errors import UsageError
from megatron_zb.train.arguments import data_prefixes

Batch = dict[str, torch.Tensor]


class NumberedTokens:
    """The part of a tokenizer that megatron-core's data sets need; the text is numbers already."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        # part of the name under which the order of the samples is cached
        self.unique_identifiers = {"class": type(self).__name__, "vocab_size": vocab_size}


def check_data(args: argparse.Namespace) -> None:
    """Read the indexes of the data sets, before ranks wait for each other.

    Raises:
        UsageError: a data set cannot be read, or too little of it falls to a split that is used.
    """
    for prefix in data_prefixes(args)[0]:
        try:
            index = IndexedDataset(prefix, mmap=True)
            lengths = index.sequence_lengths.copy()  # the file is unmapped with `index`
        except Exception as error:
            raise UsageError(
                f"--data-path {prefix}: {prefix}.idx is not a Megatron index ({error}); make the "
                "files with scripts/prepare_text.py"
            ) from error
        _check_splits(args, prefix, lengths)


def _check_splits(args: argparse.Namespace, prefix: str, lengths: Any) -> None:
    shares = normalize([float(share) for share in args.split.split(",")])
    beginning = 0.0
    for name, share in zip(("training", "evaluation"), shares, strict=False):
        end = beginning + share
        documents = lengths[round(beginning * len(lengths)) : round(end * len(lengths))]
        beginning = end
        if name == "evaluation" and not args.eval_iters:
            continue
        if documents.sum() <= args.seq_length:
            raise UsageError(
                f"--data-path {prefix}: --split '{args.split}' leaves {len(documents)} documents "
                f"with {documents.sum()} tokens for {name}, but one sequence takes "
                f"{args.seq_length + 1}: give another --split, more text or a shorter --seq-length"
            )


def build_datasets(args: argparse.Namespace) -> tuple[Any, Any]:
    """Build the data sets for training and evaluation; the latter is None without --eval-iters.

    Raises:
        UsageError: the order of the samples cannot be written to the cache.
    """
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None if args.mock_data else data_prefixes(args),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=NumberedTokens(args.vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # attention is causal, and knows it
    )
    used = (True, bool(args.eval_iters), False)
    config.split_matrix = [
        documents if use else None for documents, use in zip(config.split_matrix, used, strict=True)
    ]
    sizes = [args.train_iters * args.global_batch_size, args.eval_iters * args.global_batch_size, 0]
    try:
        kind = MockGPTDataset if args.mock_data else GPTDataset
        train, valid, _ = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    except Exception as error:
        if isinstance(error.__cause__, OSError):
            raise UsageError(
                f"the order of the samples cannot be written ({error.__cause__}): give a "
                "directory that can be written to as --data-cache-path"
            ) from error
        raise
    return train, valid


def batches(dataset: Any, args: argparse.Namespace, first_sample: int) -> Iterator[Batch]:
    """Yield this rank's microbatches endlessly, from sample `first_sample` of the whole job on.

    The samples of a global batch go to the data-parallel ranks in turn, one microbatch each, so
    that the order depends on nothing but the seed and the batch sizes. The tensors of a batch
    (tokens, labels, loss_mask, position_ids) have the shape (micro-batch-size, seq-length).

    Raises:
        UsageError: a token is outside the vocabulary.
    """
    size = args.micro_batch_size
    stride = size * args.data_parallel_size
    sample = first_sample + size * parallel_state.get_data_parallel_rank()
    while True:
        yield microbatch(dataset, args, sample)
        sample += stride


def microbatch(dataset: Any, args: argparse.Namespace, sample: int) -> Batch:
    """Return the microbatch that begins with a sample of the whole job; see :func:`batches`.

    Raises:
        UsageError: a token is outside the vocabulary.
    """
    samples = range(sample, sample + args.micro_batch_size)
    return _collate([dataset[index % len(dataset)] for index in samples], args)


def _collate(rows: Sequence[Batch], args: argparse.Namespace) -> Batch:
    names = ("tokens", "labels", "loss_mask", "position_ids")
    batch = {name: torch.stack([row[name] for row in rows]) for name in names}
    largest = int(torch.maximum(batch["tokens"].max(), batch["labels"].max()))
    if largest >= args.vocab_size:
        raise UsageError(
            f"--data-path {' '.join(args.data_path)} has token {largest}, but the vocabulary ends "
            f"at {args.vocab_size - 1}: give the --vocab-size that the data was made with"
        )
    if args.cpu:
        return batch
    # from memory that is not pinned, the driver may wait for the computation
    return {name: tensor.pin_memory().cuda(non_blocking=True) for name, tensor in batch.items()}
