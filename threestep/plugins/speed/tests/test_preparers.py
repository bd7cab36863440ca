"""Dry runs count what tiles, lean parts and offloaded inputs hold."""

from __future__ import annotations

import pytest

from threestep.plugins.plan.dry_run.activations import saved_activations
from threestep.plugins.plan.dry_run.plan import LargestForward, plan_training
from threestep.plugins.plan.dry_run.table import most_at_once
from threestep.plugins.plan.tests.dry_run.test_dry_run_memory import (
    GPU,
    HIDDEN,
    INNER,
    LAYERS,
    LONG,
    ROWS,
    TOKENS,
    built,
    eight_billion,
    planned,
)
from threestep.plugins.speed.preparers import InputsOnHost, MlpsInTiles
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import PlannedDevice
from training.utils.engine.config.arguments import EngineSettings
from training.utils.models.settings import ModelSettings


def test_mlps_in_tiles_keep_their_inputs_and_one_tile(tmp_path):
    """A layer of a Llama keeps of its MLP, beside its input: gate and up, T x 48 numbers each; in tiles also activation
    and product."""
    whole, tiled = (
        saved_activations(built(tmp_path, "llama"), ROWS, TOKENS, preparers=each) for each in ((), (MlpsInTiles(4),))
    )
    inner = 2 * ROWS * TOKENS * 48 * 4
    assert [before - after for before, after in zip(whole.layers, tiled.layers, strict=True)] == [inner] * 5
    assert tiled.piece == 2 * inner // 4 and tiled.layer == tiled.layers[0] + tiled.piece
    assert (whole.outside, whole.boundary) == (tiled.outside, tiled.boundary)
    assert whole.held(False) - tiled.held(False) == 5 * inner - inner // 2
    # The widest tensor is the product of T x 48; in tiles it is a norm's T x 32.
    assert (whole.widest, tiled.widest) == (ROWS * TOKENS * 48 * 4, ROWS * TOKENS * 32 * 4)
    with pytest.raises(ThreestepError, match="OPTDecoderLayer"):
        saved_activations(built(tmp_path, "opt"), ROWS, TOKENS, preparers=(MlpsInTiles(4),))


def test_layers_that_keep_all_hold_activation_product_and_normalized_inputs_too(tmp_path):
    model = built(tmp_path, "llama")
    less, whole = (saved_activations(model, ROWS, TOKENS, keep_all=choice) for choice in (False, True))
    inner = 2 * ROWS * TOKENS * 48 * 4  # activation and product, T x 48 numbers each
    norm = ROWS * TOKENS * 32 * 4
    assert [kept - without for kept, without in zip(whole.layers, less.layers, strict=True)] == [inner + 2 * norm] * 5
    assert whole.outside - less.outside == norm  # of the last
    assert saved_activations(model, ROWS, TOKENS) == less  # the model is as it was


def test_tiles_and_offloaded_inputs_of_an_8_billion_model():
    """What they take off the lines above, at P 1 and 8: MLPs in 8 tiles, and the inputs of 32 layers on the host."""
    model, most = eight_billion(), dict[int, float]()
    for sharing in (1, 8):
        t = LONG // sharing
        plain, lean = planned(model, sharing), planned(model, sharing, preparers=(MlpsInTiles(8), InputsOnHost()))
        lines = [{line.name.split(",")[0]: line for line in plan.forward} for plan in (plain, lean)]
        before, after = (each["activations"].device_bytes for each in lines)
        # Of the recomputed layer's gate, up, activation and product seven of eight tiles: 4 * 14,336 * 2 bytes a token,
        # 15.0 GB with P 1 (13.2 of them gone). Of the layers' inputs all but one: 34.4 GB with P 1, 4.3 with 8.
        tiles, inputs = 4 * INNER * 2 * t * 7 / 8, (LAYERS - 1) * HIDDEN * 2 * t
        assert before - after == pytest.approx(tiles + inputs, rel=1e-6)
        # The widest tensor was an MLP's, 14,336 numbers of 2 bytes a token; it is a norm's float32 input, 4,096 of 4.
        widths = [each["gradients of activations"].device_bytes / (3 * t) for each in lines]
        assert widths == [INNER * 2, HIDDEN * 4]
        on_host = next(line for line in lean.forward if "host" in line.name)
        assert (on_host.device_bytes, on_host.host_bytes) == (0, LAYERS * HIDDEN * 2 * t)  # already powers of two
        most[sharing] = most_at_once(lean.engine.held, lean.moments)[0].device_bytes / 1e9
    # 100.2 and 34.4 without them. A GPU of 80 GB, less a tenth, holds the row alone.
    assert most == pytest.approx({1: 48.9, 8: 28.0}, abs=0.1)
    assert GPU.leaves_room(int(most[1] * 1e9))


def test_offloading_is_refused_on_a_cpu_that_is_planned_for():
    loading = ModelSettings("8b", gradient_checkpointing=True, preparers=(InputsOnHost(),))
    forward = LargestForward(1, 128, 128, masked=True)
    with pytest.raises(ThreestepError, match="--activation_offload moves layer inputs from a GPU"):
        plan_training(eight_billion(), forward, loading, EngineSettings("bf16"), ranks=1, device=PlannedDevice(False))
