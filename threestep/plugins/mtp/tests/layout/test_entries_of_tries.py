"""A head's entries of sequences that share beginnings."""

from __future__ import annotations

from tests.support.tries import forked_sequences
from threestep.plugins.mtp.layout.entries import mtp_entries, mtp_targets
from training.utils.contracts.documents import plain
from training.utils.layout.rows import packed_rows
from training.utils.layout.trie import trie_document


def test_the_depths_of_multi_token_prediction_count_every_owner():
    sequences = forked_sequences(5)
    document = trie_document(sequences, 1)
    entries = mtp_entries(packed_rows([[document]], 0, with_before=True), 3)
    for depth, entry in enumerate(entries, start=1):
        assert entry.rows.segments.repeats is None
        expected = mtp_targets([plain(each) for each in sequences], depth)
        assert entry.rows.target_ids_M.numel() == mtp_targets([document], depth) == expected > 0
