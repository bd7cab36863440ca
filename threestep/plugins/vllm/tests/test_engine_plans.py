"""What the dry run of step 3 says of vLLM, on a machine without it too."""

from __future__ import annotations

import re

from threestep.plugins.plan.tests.conftest import dry_run  # noqa: F401  # a fixture
from threestep.plugins.plan.tests.dry_run.test_ppo import parts, said  # noqa: F401  # fixtures


def test_no_rank_holds_a_whole_actor_where_ranks_share_it(said):  # noqa: F811
    """What sleeps between rollouts is no part of what is held."""
    flags = ("--actor_zero_stage", "3", "--num_ranks", "2", "--rollout_engine", "vllm", "--device", "cuda")
    share = said(*flags, "--vllm_tensor_parallel_size", "2", "--device_memory_gb", "80")
    assert "the actor's weights, whole" not in share and "weights on their way to vLLM" in share
    assert float(re.search(r"\+ rollout: vLLM, --vllm_memory_share 0.3 +([\d.]+) ", share)[1]) == 22.4  # GiB
    cache = said(*flags, "--vllm_tensor_parallel_size", "2", "--vllm_cache_gib", "3")
    assert "+ rollout: vLLM's weights, 1 / 2" in cache and re.search(
        r"\+ rollout: vLLM's key-value cache +3.000", cache
    )
    awake = said(*flags, "--vllm_cache_gib", "3", "--vllm_sleep", "false")
    assert re.search(r"\n  rollout: vLLM's key-value cache +3.000", awake)


def test_ranks_that_draw_together_read_a_part_of_the_weights_each(parts):  # noqa: F811
    engine = ("--rollout_engine", "vllm", "--num_ranks", "4")
    alone, together = parts(*engine), parts(*engine, "--vllm_tensor_parallel_size", "4")
    assert "sums between ranks that draw together" not in alone
    assert together["sums between ranks that draw together"] > 0
    assert together["decode"] <= alone["decode"]
