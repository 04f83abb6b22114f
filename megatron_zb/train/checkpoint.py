"""Checkpoints by megatron-core's dist_checkpointing, which any placement of the model can load."""

from __future__ import annotations

import argparse
import os
import queue
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_zb.children import end_with_parent
from megatron_zb.errors import UsageError, end_with
from megatron_zb.job import data_contents
from megatron_zb.parsing import flag_of, gib
from megatron_zb.train.checkpoint_contents import check_contents
from megatron_zb.train.checkpoint_directory import (
    TRACKER,
    checkpoint_path,
    latest_checkpoint,
    set_latest,
)
from megatron_zb.train.model import Trainee
from megatron_zb.train.processes import is_lost_connection

# Arguments that make a model what it is: a checkpoint fits only a model that agrees on them.
_MODEL = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups padded_vocab_size
max_position_embeddings position_embedding_type normalization swiglu disable_bias_linear
untie_embeddings_and_output_weights kv_channels add_qkv_bias qk_layernorm rotary_base
rotary_percent use_rope_scaling rope_scaling_factor
""".split()

# megatron-core's settings of a layout that every other placement can read.
LAYOUT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class Progress:
    """The progress of training."""

    iteration: int
    consumed_samples: int


def save(args: argparse.Namespace, trainee: Trainee, progress: Progress) -> None:
    """Write a checkpoint; until it is complete the directory names the previous one as the latest.

    Raises:
        UsageError: the directory cannot be written.
    """
    state = {
        **_state(trainee, loading=False),
        "rng_state": _random_states(),
        "scheduler": trainee.scheduler.state_dict(),
        "progress": vars(progress),
        "args": vars(args),
    }
    write(Path(args.save), progress.iteration, state, LAYOUT)


def write(directory: Path, iteration: int, state: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Write a state as the checkpoint of an iteration; collective over all ranks.

    Args:
        directory: the directory that `--save` names.
        iteration: the iteration in the checkpoint's name.
        state: megatron-core's sharded tensors, and plain values, which rank 0 writes.
        metadata: the layout of the state, for its readers.

    Ends the job with one sentence where the disk is full.

    Raises:
        UsageError: the directory cannot be written.
    """
    final = checkpoint_path(directory, iteration)
    unfinished = final.with_name(f"{final.name}.unfinished")
    if dist.get_rank() == 0:
        _make_empty(unfinished)
    dist.barrier()
    try:
        with _results_kept_here():
            dist_checkpointing.save(
                state, str(unfinished), content_metadata=metadata, async_sharded_save=False
            )
    except (CheckpointException, OSError, RuntimeError) as error:  # the first is no Exception
        if is_lost_connection(error):
            raise
        failure = _unwritten(directory, iteration, error)
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        end_with(failure, dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 0:
        _rename(unfinished, final)
        set_latest(directory, iteration)
    dist.barrier()


def _unwritten(directory: Path, iteration: int, error: BaseException) -> UsageError:
    """Describe a checkpoint that cannot be written; the disk is as full as it was then."""
    reason = getattr(error, "strerror", None) or _first_line(error)
    free = gib(shutil.disk_usage(directory).free)
    return UsageError(
        f"--save {directory}: the checkpoint of iteration {iteration} cannot be written ({reason}; "
        f"{free} of the disk are free): earlier checkpoints are as they were; make room, or give "
        "another directory"
    )


def _rename(unfinished: Path, final: Path) -> None:
    """Rename a finished checkpoint; one of the same iteration stays until then.

    Raises:
        UsageError: it cannot be renamed.
    """
    older = final.with_name(f"{final.name}.older")
    try:
        if final.exists():
            shutil.rmtree(older, ignore_errors=True)
            final.rename(older)
        unfinished.rename(final)
    except OSError as error:
        raise UsageError(f"--save {final.parent} cannot be written: {error.strerror}") from error
    shutil.rmtree(older, ignore_errors=True)


@contextmanager
def _results_kept_here() -> Iterator[None]:
    """Let the writers of a checkpoint report to this process.

    megatron-core would start another one for it, which imports torch to read what they report,
    seconds for every checkpoint. That one and the writers would outlive a rank that is killed.
    """
    writers = filesystem_async.FileSystemWriterAsync
    write = writers.write_preloaded_data
    writers.write_preloaded_data = partial(_write_until_end_of, os.getpid(), write)
    filesystem_async._results_queue = queue.SimpleQueue()
    try:
        yield
    finally:
        filesystem_async._results_queue = None
        writers.write_preloaded_data = staticmethod(write)


def _write_until_end_of(rank: int, write: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Write files; a process that does nothing else ends with its rank."""
    if os.getpid() != rank:  # newer Megatron writes a single file in the rank itself
        end_with_parent(rank)
    return write(*args, **keywords)


def _make_empty(directory: Path) -> None:
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"--save {directory.parent} cannot be written: {error.strerror}"
        ) from error


def load(args: argparse.Namespace, trainee: Trainee) -> Progress:
    """Load the latest checkpoint in --load into model, optimizer, scheduler and random generators.

    Raises:
        UsageError: there is none, it is damaged, or it is of another model or kind of optimizer.
    """
    path, saved = check_checkpoint(args)
    request = _model_state(trainee) if args.finetune else _state(trainee, loading=True)
    same_ranks = not args.finetune and all(
        saved[name] == getattr(args, name)
        for name in ("pipeline_model_parallel_size", "tensor_model_parallel_size")
    )
    if same_ranks:
        request["rng_state"] = _random_states()
    state = read(path, lambda: dist_checkpointing.load(request, str(path)))
    for key, chunk in by_key(trainee.chunks).items():
        chunk.load_state_dict(state[key])
    if args.finetune:
        trainee.optimizer.reload_model_params()
        return Progress(0, 0)
    trainee.optimizer.load_state_dict(state["optimizer"])
    trainee.scheduler.load_state_dict(state["scheduler"])
    if same_ranks:
        _set_random_states(state["rng_state"])
    return Progress(**state["progress"])


def read(path: Path, attempt: Callable[[], dict[str, Any]], flag: str = "--load") -> dict[str, Any]:
    """Return what `attempt` reads from the checkpoint `path`.

    Raises:
        UsageError: one sentence about what is wrong with the files; `flag` named the checkpoint.
    """
    try:
        return attempt()
    except (CheckpointException, Exception) as error:  # the former is no Exception
        if is_lost_connection(error):
            raise
        raise UsageError(
            f"{flag}: {path} cannot be read ({_first_line(error)}): a file of it is missing or "
            "damaged; to load an earlier checkpoint, write its iteration into "
            f"{path.parent / TRACKER}"
        ) from error


def _first_line(error: BaseException) -> str:
    """Return what an error says, or what the first failure of a checkpoint's ranks does."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)


def check_checkpoint(args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Find the latest checkpoint in --load and its stored arguments; needs no process group.

    Raises:
        UsageError: there is none, or it is of another model, kind of optimizer or data.
    """
    _, path = latest_checkpoint(Path(args.load))
    check_contents(path, "--load")
    common = read(path, lambda: dist_checkpointing.load_common_state_dict(str(path)))
    stored = common.get("args", {})
    saved: dict[str, Any] = vars(stored) if isinstance(stored, argparse.Namespace) else stored
    layers = args.heterogeneous_layers_config_encoded_json
    if (saved.get("heterogeneous_layers_config_encoded_json") or None) != layers:
        raise UsageError(
            f"--load: {path} has other layers: give --heterogeneous-layers-config-path what it was "
            "made with, or leave it out for a model with layers of one shape"
        )
    names = [*_MODEL] if args.finetune else [*_MODEL, "bf16"]
    of_layers = () if layers is None else ("ffn_hidden_size", "num_query_groups")
    for name in (name for name in names if name not in of_layers):
        mine = getattr(args, name)
        if saved.get(name) != mine:
            raise UsageError(
                f"--load: {path} was written with {flag_of(name)} {saved.get(name)}, this run has "
                f"{mine}; they must be the same"
            )
    for name in () if args.finetune else ("fp16", "use_distributed_optimizer"):
        if saved.get(name):
            raise UsageError(
                f"--load: {path} was written with {flag_of(name)}, which only Megatron-LM's "
                "scripts continue: give --finetune to take its weights alone"
            )
    if not (args.finetune or args.skip_train or args.pipeline_allow_other_data):
        mine = getattr(args, data_contents.RECORD)
        data_contents.check_resume(saved.get(data_contents.RECORD), mine, str(path))
    return path, saved


def _state(trainee: Trainee, *, loading: bool) -> dict[str, Any]:
    """Return model and optimizer as megatron-core's sharded tensors, by global layer numbers."""
    state = _model_state(trainee)
    optimizer = trainee.optimizer.sharded_state_dict(
        state, is_loading=loading, metadata=_metadata()
    )
    return {**state, "optimizer": optimizer}


def _model_state(trainee: Trainee) -> dict[str, Any]:
    metadata = _metadata()
    return {
        key: chunk.sharded_state_dict(metadata=metadata)
        for key, chunk in by_key(trainee.chunks).items()
    }


def by_key(chunks: Sequence[Any]) -> dict[str, Any]:
    """Return the chunks of a model, unwrapped, by their keys in a state."""
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    return {name: unwrap_model(chunk) for name, chunk in zip(names, chunks, strict=True)}


def _metadata() -> dict[str, Any]:
    """Return the layout of the state, with the group of the ranks that hold copies of it."""
    return {
        **LAYOUT,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _random_states() -> ShardedObject:
    """Return this rank's random states; only the same pipeline and tensor ranks load them again."""
    state = {
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(
        "rng_state",
        state,
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _set_random_states(state: dict[str, Any]) -> None:
    random.setstate(state["random"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
