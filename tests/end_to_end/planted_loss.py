"""Direct preference optimisation with one more loss, of log-probabilities per token without a reference.

python -m tests.end_to_end.planted_loss FLAGS
"""

import sys

from torch.nn.functional import logsigmoid

from training.step2_dpo.loss import LOSSES
from training.step2_dpo.main import main
from training.utils.plugins.objectives import PreferenceLoss

LOSSES["planted"] = PreferenceLoss(
    "is planted", lambda margins_Q, how: -logsigmoid(how.beta * margins_Q), is_token_mean=True, needs_reference=False
)

if __name__ == "__main__":
    main(sys.argv[1:])
