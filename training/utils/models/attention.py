"""How a layout reaches the attention implementation that a model was loaded with.

| --attn_implementation | what it is given | where |
| --- | --- | --- |
| sdpa | a boolean mask of who sees whom, none where causal attention is enough | everywhere; quadratic in the row |
| sdpa, on a CPU | the runs that make up the rows (`document_attention`) | families that hand keyword arguments on |
| flex_attention | a block mask: blocks that nobody sees are skipped, shared prompts too | CUDA (no backward on a CPU) |
| flash_attention_2, _3 | cumulative lengths of the documents, all rows as one | CUDA; no shared prompts |

Knows no engine and no loss. N rows, T tokens in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.utils.run.errors import Mistakes

if TYPE_CHECKING:
    from training.utils.layout.planner import PlanSettings
    from training.utils.layout.rows import TokenRows

SDPA, FLEX = "sdpa", "flex_attention"
FLASH = ("flash_attention_2", "flash_attention_3")
IMPLEMENTATIONS = (SDPA, FLEX, *FLASH)
BY_DOCUMENT = "sdpa_by_document"  # what sdpa becomes on a CPU


def check_implementation(mistakes: Mistakes, name: str) -> None:
    """Note an attention implementation that has no form of the layout."""
    mistakes.require_one_of("--attn_implementation", name, IMPLEMENTATIONS)


def shares_prompts(implementation: str) -> bool:
    """Whether one document may hold a prompt and several responses that do not see each other."""
    return implementation not in FLASH


def long_rows_are_free(implementation: str) -> bool:
    """Whether attention costs what each document costs, in a row of any length (a dense mask pays for the row)."""
    return implementation in (BY_DOCUMENT, FLEX, *FLASH)


def plan_for(
    model: Any,
    sequences: int,
    longest_tokens: int,
    packed: bool,
    ranks: int,
    max_tokens_per_micro_batch: int | None = None,
    forward_tokens: float = float("inf"),
) -> PlanSettings:
    """`forward_plan` for a transformers model: what attention costs is read off it."""
    from training.utils.layout.planner import forward_plan

    return forward_plan(
        sequences=sequences,
        longest_tokens=longest_tokens,
        hidden_size=model.config.get_text_config().hidden_size,
        packed=packed,
        ranks=ranks,
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        long_rows_are_free=long_rows_are_free(model.config._attn_implementation),
        forward_tokens=forward_tokens,
    )


def model_inputs(rows: TokenRows, implementation: str) -> dict[str, Any]:
    """The keyword arguments of a transformers model's forward. Hidden states come back as [N, T] or as one row of
    N x T; flattened, a token stands at the same place."""
    inputs: dict[str, Any] = {
        "input_ids": rows.input_ids_NT,
        "position_ids": rows.position_ids_NT,
        "attention_mask": None,
        "use_cache": False,
    }
    if implementation in FLASH:
        lengths, longest = rows.cumulative_lengths()
        inputs["input_ids"] = rows.input_ids_NT.view(1, -1)
        inputs["position_ids"] = rows.position_ids_NT.view(1, -1)
        inputs.update(cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=longest, max_length_k=longest)
    elif implementation == FLEX:
        inputs["attention_mask"] = _block_mask(rows)
    elif implementation == BY_DOCUMENT:
        from training.utils.layout.runs import runs_of

        runs = runs_of(rows)
        if runs is not None:
            inputs["attention_mask"] = _unread_mask(rows)
            inputs["runs"] = runs
    else:
        inputs["attention_mask"] = rows.dense_mask()
    return inputs


def _unread_mask(rows: TokenRows) -> Any:
    """All False [N, 1, T, T] in one byte. A mask that is there is handed through as it is; this one is read by nobody.
    A family that reads it after all gets NaN, and the start-up check takes it off packed rows."""
    import torch

    count, width = rows.input_ids_NT.shape
    return torch.zeros((), dtype=torch.bool, device=rows.input_ids_NT.device).expand(count, 1, width, width)


def _block_mask(rows: TokenRows) -> Any:
    """A BlockMask [N, 1, T, T] of the rule of `TokenRows.dense_mask`."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    count, width = rows.input_ids_NT.shape
    seen_NSS = rows.visible_NSS
    if seen_NSS is None:  # one document a row, and its padding
        seen_NSS = torch.eye(2, dtype=torch.bool, device=rows.input_ids_NT.device).expand(count, 2, 2)
    segment_NT = rows.segment_ids_NT % seen_NSS.shape[1]  # -1, padding, is the last segment

    def may_look(n: Any, head: Any, q: Any, k: Any) -> Any:
        return (q >= k) & seen_NSS[n, segment_NT[n, q], segment_NT[n, k]]

    return create_block_mask(may_look, count, None, width, width, device=rows.input_ids_NT.device)
