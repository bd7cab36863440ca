"""Multi-token prediction: a head that predicts further tokens, its training, and its folder."""
