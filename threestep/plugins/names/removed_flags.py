"""Flags of version 0.1 that are gone, each with what to use instead. The configurations of its runs, which have every
flag, are read: a value that asks for nothing is left out."""

from __future__ import annotations

from functools import partial

from threestep.plugins.names.other_names import OldFlag, Refused

_refused = partial(Refused, whose=("Threestep 0.1",))

REMOVED_FLAGS: dict[str, OldFlag] = {
    "--init_lr_ratio": _refused("was removed: warm-up always begins at a rate of 0; leave it out", unless=("0", "0.0")),
    "--num_cycles": _refused(
        "was removed: the cosine falls only once, as it did with 0.5; leave it out", unless=("0.5",)
    ),
    "--zero3_prefetch_parameters": _refused(
        "was removed: only one layer is gathered ahead, within --zero3_live_parameters; in steps 1 and 2, "
        "stage3_prefetch_bucket_size in --deepspeed_config still sets it"
    ),
}
