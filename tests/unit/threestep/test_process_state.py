"""Whatever a run sets is as it was before, also after a failure."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

import pytest
import torch

from threestep.process_state import callers_state, silent_bars


def set_everything():
    sys.excepthook = threading.excepthook = sys.unraisablehook = lambda *failure: None
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.environ["THREESTEP_TEST_NEW"], os.environ["THREESTEP_TEST_OLD"] = "1", "2"
    sys.path.append("/nowhere")
    sys.argv.append("more")
    logging.getLogger("threestep_test").setLevel(logging.ERROR)
    logging.root.setLevel(logging.DEBUG)
    logging.raiseExceptions = False
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)


def state():
    return [
        sys.excepthook, threading.excepthook, sys.unraisablehook, signal.getsignal(signal.SIGUSR1), dict(os.environ),
        sys.path[:], sys.argv[:], logging.getLogger("threestep_test").level, logging.root.level,
        logging.raiseExceptions, torch.get_num_threads(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
    ]  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_given_back(fails, monkeypatch):
    monkeypatch.setenv("THREESTEP_TEST_OLD", "1")
    logging.getLogger("threestep_test").setLevel(logging.INFO)
    before = state()
    try:
        with callers_state():
            set_everything()
            assert all(now != then for now, then in zip(state(), before, strict=True))
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert state() == before


def shown_bars():
    import datasets
    import huggingface_hub.utils as hub
    from transformers.utils import logging as transformers_logging

    return [
        transformers_logging.is_progress_bar_enabled(), not datasets.utils.are_progress_bars_disabled(),
        not hub.are_progress_bars_disabled(),
    ]  # fmt: skip


@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, True], [True, False, False], [False] * 3])
def test_bars_are_shown_as_before(wanted):
    import datasets
    import huggingface_hub.utils as hub
    from transformers.utils import logging as transformers_logging

    def set_to(transformers, of_datasets, of_hub):
        (transformers_logging.enable_progress_bar if transformers else transformers_logging.disable_progress_bar)()
        (datasets.utils.enable_progress_bars if of_datasets else datasets.utils.disable_progress_bars)()
        (hub.enable_progress_bars if of_hub else hub.disable_progress_bars)()

    before = shown_bars()
    try:
        set_to(*wanted)
        with pytest.raises(KeyError), silent_bars():
            assert shown_bars() == [False] * 3
            raise KeyError
        assert shown_bars() == wanted
        with callers_state():
            set_to(*(not each for each in wanted))
        assert shown_bars() == wanted
    finally:
        set_to(*before)
