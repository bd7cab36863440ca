"""The search, on a machine whose memory and seconds are a formula."""

from __future__ import annotations

import pytest

from threestep.plugins.plan.search import best_of, fits, search
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import MemoryLine


def test_the_fastest_of_what_fits_comes_first(wanted, estimates):
    """900 of 1,000 bytes may be used. Four sequences of a rank: whole, 600 bytes with ZeRO-3, one micro-step of 6 + 1
    seconds; on the host with offload 400 bytes, 6 + 5; whole stages hold one sequence, 4 x 3 seconds."""
    best = best_of(search(wanted(), estimates), wanted())
    first = best[0].choice
    assert (first.zero_stage, first.offload, first.recompute, first.micro_batch) == (3, False, False, 4)
    assert best[0].seconds == pytest.approx(7.0)
    assert [one.seconds for one in best] == sorted(one.seconds for one in best)
    assert best[0].settings["gradient_accumulation_steps"] == 1


def test_it_is_the_fastest_of_all_that_fit(wanted, estimates):
    here = wanted(gpu_bytes=500)
    tried = search(here, estimates)
    fitting = [one for one in tried if fits(one.memory, here)]
    assert fitting and best_of(tried, here)[0].seconds == min(sum(one.parts.values()) for one in fitting)
    assert all(one.parts is None for one in tried if not fits(one.memory, here))


def test_more_memory_is_never_slower(wanted, estimates):
    seconds = []
    for gpu_bytes in range(150, 2000, 50):
        here = wanted(gpu_bytes=gpu_bytes)
        seconds.append(best_of(search(here, estimates), here)[0].seconds)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


def test_the_batch_is_the_same_in_every_setting(wanted, estimates):
    for one in search(wanted(ranks=2), estimates):
        settings = one.settings
        assert 2 * settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 16


def test_the_host_bounds_too(wanted, estimates):
    here = wanted(gpu_bytes=200, host_bytes=100)
    with pytest.raises(ThreestepError) as mistake:
        best_of(search(here, estimates), here)
    assert "nothing fits 4 x h100: the closest setting (ZeRO-3, micro-batches of 1, recomputation) needs" in str(
        mistake.value
    )
    assert "GPU memory where a rank has" in str(mistake.value) and "give more --gpus" in str(mistake.value)


def test_a_batch_that_ranks_cannot_share(wanted, estimates):
    here = wanted(ranks=3)
    with pytest.raises(ThreestepError, match="--sequences_per_step 16 expects a multiple of the 3 ranks"):
        best_of(search(here, estimates), here)


def test_a_tenth_of_the_gpu_is_left(wanted):
    assert fits(MemoryLine("", 900), wanted()) and not fits(MemoryLine("", 901), wanted())
