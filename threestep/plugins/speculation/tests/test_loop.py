"""What --speculate asks for, and what it does not go with."""

from __future__ import annotations

import pytest

from tests.unit.step3_ppo.flags.test_checks import names_of
from threestep.plugins.images.tests.run.test_run_checks import beside_images
from threestep.plugins.speculation.settings import Speculation
from training.utils.base.errors import ThreestepError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"mtp_num_layers": 0, "speculate_by": "head"},
            "--speculate 1 guesses by a head for multi-token prediction, and there is none; give --mtp_num_layers 1 or "
            "--speculate_by ngram, or leave --speculate out",
        ),
        ({"speculate": "0", "speculate_by": "ngram"}, "--speculate_by ngram says how --speculate guesses, and it"),
        ({"rollout_engine": "hybrid"}, "--rollout_engine hybrid does not support --speculate, got 1; leave it out or"),
        ({"rollout_replay": "there"}, "several tokens at once, and --rollout_replay draws nothing; leave one of them"),
        ({"speculate": "-1"}, "--speculate expects the number of tokens to guess, 0 to 8, or auto, got '-1'"),
        ({"speculate": "often"}, "--speculate expects the number of tokens to guess, 0 to 8, or auto, got 'often'"),
    ],
)
def test_what_guesses_cannot_go_with(given, said):
    with pytest.raises(ThreestepError, match=said):
        names_of(**{"speculate": "1", "mtp_num_layers": 1, **given})


def test_what_is_guessed():
    found = [names_of(speculate=given, mtp_num_layers=1).loop for given in ("0", "3", "auto")]
    assert [loop and loop.how for loop in found] == [None, Speculation(3), Speculation(1, is_auto=True)]
    assert names_of(speculate="2", speculate_by="ngram").loop.how == Speculation(2, by="ngram")
    assert names_of(speculate="2").loop.how == Speculation(2, by="ngram")  # there is no head


def test_images_are_no_texts():
    with pytest.raises(ThreestepError, match="--speculate 2 does not go with prompts that have images: it guesses the"):
        beside_images(speculate="2", speculate_by="ngram")


def test_what_was_chosen_is_told():
    assert names_of(speculate="2", speculate_by="ngram").loop.choices() == []
    [choice] = names_of(speculate="2").loop.choices()
    assert choice == ("speculate_by", "ngram", "there is no head", None)
