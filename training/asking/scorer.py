"""A reward model that scores answers, of models that may have another tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from training.step2_reward.evaluate import EvaluateArguments, load_scorer
from training.step2_reward.evaluation import ScoredResponses
from training.utils.data.arguments import DataArguments
from training.utils.data.build import text_maker
from training.utils.data.chat import ChatTokenizer
from training.utils.data.conversations import BadConversation, Conversation, checked_messages, response_message
from training.utils.data.message_forms import Message, prompt_text
from training.utils.data.phases import ResponsesRow
from training.utils.data.tokenize import Ids, TextTokenizer
from training.utils.engine.startup import Ranks
from training.utils.models.loading import load_config, load_tokenizer
from training.utils.run.errors import ThreestepError

_LONGEST_TOKENS = 2**20  # of a model that has no bound
_WHERE = "the conversation"


@dataclass(frozen=True)
class Scorer:
    """name: the reward model's path. texts: how it reads texts, in its own tokenizer."""

    name: str
    tokenizer: Any
    texts: TextTokenizer | ChatTokenizer
    score_rows: Callable[[Sequence[ResponsesRow]], ScoredResponses]

    def score_ids(self, prompts: Sequence[Ids], responses: Sequence[Ids]) -> list[float]:
        """The scores of responses in this model's own tokens, the token that ends them included. A collective."""
        rows = [
            ResponsesRow(place, np.array(prompt, np.int32), (np.array(response, np.int32),))
            for place, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]
        return self.score_rows(rows).score_R.tolist()

    def ids_of_text(self, prompt: str | Sequence[Message], response: str) -> tuple[Ids, Ids]:
        """A prompt (text as the data room writes it, or messages) and a response, as this model reads them."""
        if isinstance(self.texts, ChatTokenizer):
            if isinstance(prompt, str):
                raise ThreestepError(
                    f"the reward model '{self.name}' reads conversations by its chat template, in another tokenizer "
                    "than the answers': take one with their tokenizer, or --prompt_style human_assistant"
                )
            return _ids_of_messages(self.texts, prompt, response)
        text = prompt if isinstance(prompt, str) else prompt_text(prompt, None, _WHERE)
        [prompt_ids] = self.texts.encode_prompts([text])
        [response_ids] = self.texts.encode_responses([text], [prompt_ids], [f" {response.strip()}"])
        return prompt_ids, response_ids


def _ids_of_messages(texts: ChatTokenizer, messages: Sequence[Message], response: str) -> tuple[Ids, Ids]:
    found = texts.responses(
        Conversation(checked_messages(list(messages), _WHERE), _WHERE), [response_message(response)]
    )
    if found is None:
        raise ThreestepError(f"{_WHERE}: the reward model's chat template renders an answer without its prompt")
    prompt, answers = found
    [ids] = texts.encode([[*prompt, *answers]], [_WHERE])
    if isinstance(ids, BadConversation):
        raise ids
    return [token for piece in ids[: len(prompt)] for token in piece], ids[-1]


def load_answer_scorer(name_or_path: str, dtype: str | None, data: DataArguments, ranks: Ranks) -> Scorer:
    """Load a reward model that reads conversations in data's style; float32 unless told otherwise."""
    tokenizer = load_tokenizer(name_or_path, end_may_pad=True)
    positions = getattr(load_config(name_or_path).get_text_config(), "max_position_embeddings", None)
    data = replace(data, max_seq_len=positions or _LONGEST_TOKENS)
    how = EvaluateArguments(
        model_name_or_path=name_or_path, padded=True, dtype=EvaluateArguments.dtype if dtype is None else dtype
    )
    texts = text_maker(data, tokenizer, None)
    return Scorer(name_or_path, tokenizer, texts, load_scorer(how, data, tokenizer, ranks))
