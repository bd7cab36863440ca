"""Start and end of a DeepSpeed process: ranks, device, process group. A single process needs no launcher."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.errors import ThreestepError
from training.utils.engine.ranks.backends import Backends
from training.utils.engine.ranks.collectives import barrier, wait_for_main
from training.utils.engine.ranks.devices import (
    bound_kept_products,
    device_of,
    set_allocator,
    set_threads,
    take_accelerator,
)
from training.utils.engine.ranks.host_memory import keep_freed_memory
from training.utils.engine.ranks.rank_watch import leave_process_group, started_watch
from training.utils.models.one_precision import ROUNDED
from training.utils.models.row_sharing import ALONE, RowSharing, row_sharing
from training.utils.run.launch import free_port
from training.utils.run.program import quick_imports
from training.utils.run.run_arguments import RANK_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from training.utils.flags.added import AddedFlags

QUIETED_LOGGERS = ("DeepSpeed", "deepspeed", "torch.distributed", "transformers.trainer_utils")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks, and the device it computes on.

    leaving: releases engines when the process leaves the group, so that another run may follow in this process
    timeout_seconds: of a collective
    sharing: the ranks that share rows with this one; rows are dealt to groups
    backends: hold while the loop trains
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    leaving: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, compare=False, repr=False)
    timeout_seconds: float = RANK_TIMEOUT_SECONDS
    sharing: RowSharing = ALONE
    backends: Backends = Backends()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def groups(self) -> int:
        """Among how many rows are dealt: one for each rank, unless ranks share rows."""
        return self.world_size // self.sharing.size

    @property
    def group(self) -> int:
        """The number of this rank's group."""
        return self.rank // self.sharing.size

    @property
    def leads(self) -> bool:
        """True for one rank of each group: the others compute the same figures."""
        return self.sharing.place == 0


def sharing_rows(ranks: Ranks, flags: AddedFlags) -> Ranks:
    """Return the ranks in the groups that share rows, as flags ask. A collective."""
    return replace(ranks, sharing=row_sharing(flags).joined(ranks.rank, ranks.world_size, ranks.timeout_seconds))


@contextlib.contextmanager
def started_process_group(timeout_seconds: float = RANK_TIMEOUT_SECONDS, shares_gpu: bool = False) -> Iterator[Ranks]:
    """Join the launcher's process group, or make one of a single process; leave it at the end.

    timeout_seconds: how long a rank waits for the others in a collective (but see `wait_for_main`).
    shares_gpu: see `devices.set_allocator`.

    With a group that is not destroyed, a finished run may exit with an error (`terminate called without an active
    exception`, seen with gloo on two ranks).
    """
    take_accelerator(os.environ)  # before transformers imports DeepSpeed
    _quiet_libraries()
    set_allocator(os.environ, shares_gpu)
    set_threads(os.environ, int(os.environ.get("WORLD_SIZE", "1")))
    bound_kept_products(os.environ)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = device_of(local_rank, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    alone: dict[str, str] = {}
    if "WORLD_SIZE" not in os.environ:
        # deepspeed.init_distributed looks for mpi4py where these are missing (deepspeed 0.19, comm/comm.py).
        alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        os.environ.update(alone)
    deepspeed = _imported_deepspeed()
    from deepspeed.accelerator import get_accelerator

    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    backend = get_accelerator().communication_backend_name()
    if alone:  # torch's store would listen on every address of this machine
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
    # DeepSpeed makes the groups that reduce gradients with torch's default timeout (deepspeed 0.19, utils/groups.py):
    # 30 minutes for gloo, 10 for NCCL.
    deepspeed.comm.comm.cdb.new_group = partial(torch.distributed.new_group, timeout=timeout)
    if device.type == "cpu":
        keep_freed_memory()
    ranks = Ranks(
        int(os.environ["RANK"]), local_rank, int(os.environ["WORLD_SIZE"]), device, timeout_seconds=timeout_seconds
    )
    watch = started_watch(ranks.rank, ranks.world_size)
    failed = True
    try:
        yield ranks
        wait_for_main()  # rank 0 may still be writing the model
        barrier()  # a rank that leaves while another works may abort at its end (gloo, one run in ten)
        failed = False
    finally:
        if failed:
            watch.report_failure()
        if not failed or ranks.world_size == 1:
            ranks.leaving.close()
        leave_process_group(failed)
        watch.stop()
        for name in alone:
            os.environ.pop(name, None)


def _imported_deepspeed() -> Any:
    """DeepSpeed, which logs errors alone and compiles nothing."""
    with quick_imports():
        import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # after the import, which sets it to WARNING
    # On a CPU deepspeed compiles a shared-memory collective at start-up; only inference_all_reduce uses it
    # (deepspeed 0.19, comm/torch.py), which training never calls, and without a compiler it would end the run.
    # The rest of this table nobody reads, and to make it tries a compiler out.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def born_sharded(config: dict[str, Any], zero_stage: int) -> Iterator[None]:
    """Inside, transformers' from_pretrained creates ZeRO-3 models sharded, with the buffers that it computes elsewhere;
    other stages change nothing."""
    if zero_stage != 3:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    alive = HfDeepSpeedConfig(config)  # transformers keeps a weak reference only
    try:
        with _buffers_unrounded():
            yield
    finally:
        del alive
        unset_hf_deepspeed_config()


@contextlib.contextmanager
def _buffers_unrounded() -> Iterator[None]:
    """Inside, `deepspeed.zero.Init` casts weights alone.

    It would cast every tensor that a model's constructor makes, rotary frequencies too (deepspeed 0.19,
    partition_parameters.py: zero_wrapper_for_fp_tensor_constructor): in bfloat16, angles of position 2,048 are off by
    radians.
    """
    import deepspeed

    original: Any = deepspeed.zero.Init

    class WeightsInit(original):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            overrides = [deepspeed.zero.DeepSpeedTensorOverride.device]
            super().__init__(*args, **{"tensor_overrides": overrides, **kwargs})

        def _post_init_method(self, module: torch.nn.Module) -> None:
            for weight in module.parameters(recurse=False):
                if weight.is_floating_point() and weight.dtype is not self.dtype and not hasattr(weight, "ds_id"):
                    setattr(weight, ROUNDED, True)
                    weight.data = weight.data.to(self.dtype)  # as DeepSpeed does at the other stages
            super()._post_init_method(module)

    deepspeed.zero.Init = WeightsInit
    try:
        yield
    finally:
        deepspeed.zero.Init = original


def check_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype for "fp32", "bf16" or "fp16"; ThreestepError if this machine cannot train in it."""
    if dtype == "fp16" and not torch.cuda.is_available():
        raise ThreestepError("--dtype fp16 needs a GPU: DeepSpeed refuses it on a CPU; use bf16 or fp32")
    return DTYPES[dtype]


def _quiet_libraries() -> None:
    """Silence the libraries below errors (DeepSpeed, transformers), and a known warning."""
    for name in QUIETED_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # deepspeed 0.19 uses names of collectives that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
