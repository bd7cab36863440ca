"""Settings for runs beside the clock of a CPU."""

from __future__ import annotations

from benchmarks.clock.cpu import drawn_setting, sequences


def test_a_seed_is_a_setting():
    settings = [drawn_setting(seed) for seed in range(20)]
    assert settings == [drawn_setting(seed) for seed in range(20)] and len(set(settings)) == 20
    assert all(setting.width % 64 == 0 for setting in settings) and any(setting.recomputes for setting in settings)
    assert settings[0].name.startswith(f"{settings[0].width} wide, {settings[0].layers} layers")


def test_texts_fill_rows():
    setting = drawn_setting(3)
    texts = sequences(setting)
    assert len(texts) >= 12 * setting.rows and all(len(text.split()) == 2 * setting.tokens for text in texts)
