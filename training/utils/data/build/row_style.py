"""The prompt style of a run without a chat template, found in its tokenized rows: it is saved with the model, which is
then asked in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from training.utils.contracts.rows import PromptRow, ResponsesRow
from training.utils.data.chat.style import SavedStyle, save_style
from training.utils.data.rows.arguments import AS_STORED, CHAT_TEMPLATE, HUMAN_ASSISTANT

if TYPE_CHECKING:
    from training.utils.data.cache.reports import Log
    from training.utils.data.chat.style import PromptStyle

_MOST_ROWS = 1000  # that are looked at
_BEGINS = ("Human:", "System:", "Tools:")
_ASKS = "Assistant:"
_FORMS = {HUMAN_ASSISTANT: "are 'Human: ... Assistant:'", AS_STORED: "have prompts as stored"}


@dataclass(frozen=True)
class _Prompt:
    """A row's prompt. text: "" where the row has none, and is `whole` alone. is_cut: its beginning may be missing."""

    text: str
    whole: str
    is_cut: bool

    @property
    def style(self) -> str:
        if self.text.strip():
            begins = self.is_cut or self.text.lstrip().startswith(_BEGINS)
            is_wrapped = begins and self.text.rstrip().endswith(_ASKS)
        else:
            is_wrapped = self.whole.lstrip().startswith(_BEGINS) and _ASKS in self.whole
        return HUMAN_ASSISTANT if is_wrapped else AS_STORED


def settle_style(style: PromptStyle, rows: Sequence[Any], tokenizer: Any, log: Log, *, most_tokens: int) -> PromptStyle:
    """Return the style, of the two without a template the one that the rows have where no flag names one; write it into
    `tokenizer`, and log it. Rows of the other one are a warning.

    most_tokens: at which rows were cut. The same rows give the same style on every rank.
    """
    if style.chat.prompt_style == CHAT_TEMPLATE:
        return style
    places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MOST_ROWS)).astype(int))
    prompts = [_prompt_of(rows[int(place)], tokenizer, most_tokens) for place in places]
    of_form = {form: [prompt for prompt in prompts if prompt.style == form] for form in _FORMS}
    if style.is_open and prompts:
        style = _decided(style, max(_FORMS, key=lambda form: len(of_form[form])))
    name = style.chat.prompt_style
    end = _shared_end(of_form[AS_STORED]) if name == AS_STORED else ""
    save_style(tokenizer, replace(SavedStyle.of(style.chat), prompt_end=end))
    if style.is_open:
        log(style.sentence)
    [other] = [form for form in _FORMS if form != name]
    if of_form[other]:
        advice = "write all rows in one form" if of_form[name] else f"--prompt_style {other} asks as the rows do"
        log(
            f"warning: {len(of_form[other]):,} of {len(prompts):,} rows that were looked at {_FORMS[other]}, and the "
            f"model is saved with the style {name}: it will be asked in another form than these; {advice}"
        )
    return style


def _decided(style: PromptStyle, found: str) -> PromptStyle:
    """The style of the rows, with the reason."""
    rows = f"the rows {_FORMS[found]}"
    if style.saved_as is None:
        reason = f"{style.reason}, and {rows}"
    elif style.saved_as == found:
        reason = style.reason
    else:
        reason = f"{rows}, which were {style.saved_as} where the model was trained before"
    return replace(style, chat=replace(style.chat, prompt_style=found), reason=reason)


def _prompt_of(row: Any, tokenizer: Any, most_tokens: int) -> _Prompt:
    def text(ids: np.ndarray) -> str:
        return tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    if isinstance(row, PromptRow):
        return _Prompt(row.prompt_text, row.prompt_text, False)
    if isinstance(row, ResponsesRow):
        prompt, whole = text(row.prompt_ids), ""
    else:
        begin = int(np.argmax(row.loss_mask))
        # With the loss on the whole conversation, all but the first token has some.
        prompt, whole = text(row.input_ids[: begin if begin > 1 else 0]), text(row.input_ids)
    return _Prompt(prompt, whole, row.length_tokens >= most_tokens)


def _shared_end(prompts: Sequence[_Prompt]) -> str:
    """The white space with which every prompt ends; "" where they end in several ways."""
    ends = {prompt.text[len(prompt.text.rstrip()) :] for prompt in prompts if prompt.text.strip()}
    return ends.pop() if len(ends) == 1 else ""
