"""Texts become ids, so that a prompt has the same ids in every phase and masks follow from lengths.

The prompt's ids are a prefix of every sentence made of it, as they are when a model answers the prompt. One
end-of-conversation token ends each response in all phases. Knows nothing of rows, files or phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from training.utils.contracts.paths import ParallelTags

Ids = list[int]


class TextTokenizer:
    """A tokenizer with the ids before a prompt, the id that ends a response, and the tags of parallel thinking."""

    def __init__(
        self, tokenizer: Any, end_of_conversation_token: str | None, parallel_tags: ParallelTags | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.parallel_tags = parallel_tags
        self._backend = _backend_that_agrees(tokenizer)
        self.prefix_ids: Ids = _ids_before_text(tokenizer)
        self.end_id: int = end_of_conversation_id(tokenizer, end_of_conversation_token)
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        self.special: dict[int, str] = {number: token.content for number, token in added if token.special}
        self.special[self.end_id] = tokenizer.convert_ids_to_tokens(self.end_id)
        # SentencePiece tokenizers put an extra space before any text; there a response is tokenized after its
        # prompt.
        prompt, response = "Human: a Assistant:", " a b"
        together, alone = self._encode([prompt + response])[0], self._encode([prompt, response])
        self._joins_cleanly = together == alone[0] + alone[1]

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of the texts without special tokens around them."""
        if not texts:
            return []
        if self._backend is not None:
            return _encode_directly(self._tokenizer, self._backend, list(texts))
        return _encode(self._tokenizer, list(texts))

    def encode_prompts(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of prompts or other texts, after those that the tokenizer puts before a text (such as a bos token)."""
        encoded = self._encode(texts)
        return [self.prefix_ids + ids for ids in encoded] if self.prefix_ids else encoded

    def encode_responses(
        self, prompts: Sequence[str], prompt_ids: Sequence[Ids], responses: Sequence[str]
    ) -> list[Ids]:
        """Ids of responses, each to the prompt at its index, each ended once by the end-of-conversation token."""
        if self._joins_cleanly:
            encoded = self._encode(responses)
        else:
            encoded = self._encode_after(prompts, prompt_ids, responses)
        return [ids if ids and ids[-1] == self.end_id else [*ids, self.end_id] for ids in encoded]

    def _encode_after(self, prompts: Sequence[str], prompt_ids: Sequence[Ids], responses: Sequence[str]) -> list[Ids]:
        sentences = self._encode([prompt + response for prompt, response in zip(prompts, responses, strict=True)])
        skip = len(self.prefix_ids)
        encoded: list[Ids | None] = []
        for ids, sentence in zip(prompt_ids, sentences, strict=True):
            prompt_part = ids[skip:]
            encoded.append(sentence[len(prompt_part) :] if sentence[: len(prompt_part)] == prompt_part else None)
        # Where a token spans the boundary, the prompt's ids win and the response is tokenized alone.
        apart = [index for index, ids in enumerate(encoded) if ids is None]
        for index, ids in zip(apart, self._encode([responses[index] for index in apart]), strict=True):
            encoded[index] = ids
        return [ids for ids in encoded if ids is not None]

    def encode_pieces(self, rows: Sequence[Sequence[str]]) -> list[list[Ids]]:
        """Ids of texts in pieces: a piece's ids never depend on later pieces, and no special tokens are added."""
        alone = iter(self._encode([piece for pieces in rows for piece in pieces]))
        encoded = [[next(alone) for _ in pieces] for pieces in rows]
        if self._joins_cleanly:
            return encoded
        # As for responses: a piece is tokenized after the one before it, unless a token would span the boundary.
        seams = [(row, place) for row, pieces in enumerate(rows) for place in range(1, len(pieces))]
        after = self._encode_after(
            [rows[row][place - 1] for row, place in seams],
            [self.prefix_ids + encoded[row][place - 1] for row, place in seams],
            [rows[row][place] for row, place in seams],
        )
        for (row, place), ids in zip(seams, after, strict=True):
            encoded[row][place] = ids
        return encoded


def _encode(tokenizer: Any, texts: list[str]) -> list[Ids]:
    return tokenizer(
        texts,
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


def _encode_directly(tokenizer: Any, backend: Any, texts: list[str]) -> list[Ids]:
    """`_encode` by the Rust tokenizer itself, without the masks and offsets that nobody uses: 20 % faster."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _backend_that_agrees(tokenizer: Any) -> Any | None:
    """The Rust tokenizer where it gives the same ids; None for a Python tokenizer, or one whose class changes texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast") or not hasattr(tokenizer, "split_special_tokens"):
        return None
    special = " ".join(str(token) for token in tokenizer.all_special_tokens)
    probes = ["Human: a\n\n  B? Assistant:", " 1,234.5", "", " \u00e9\u4e2d\u6587 \U0001f600", f"x {special} y"]
    return backend if _encode_directly(tokenizer, backend, probes) == _encode(tokenizer, probes) else None


def _ids_before_text(tokenizer: Any) -> Ids:
    """The special ids that the tokenizer puts before a text; those that it puts after one are left out."""
    for probe in ("a", "Human:", "1"):
        plain = tokenizer(probe, add_special_tokens=False)["input_ids"]
        whole = tokenizer(probe, add_special_tokens=True)["input_ids"]
        for begin in range(len(whole) - len(plain) + 1):
            if plain and whole[begin : begin + len(plain)] == plain:
                return list(whole[:begin])
    return []


def end_of_conversation_id(tokenizer: Any, token: str | None) -> int:
    """The id of the token that ends a response: `token`, or eos where it is None; ThreestepError if not one token."""
    if token is None:
        if tokenizer.eos_token_id is None:
            raise ThreestepError(
                f"{named_tokenizer(tokenizer)} has no eos token to end a response with; name a token of its vocabulary "
                "with --end_of_conversation_token"
            )
        return int(tokenizer.eos_token_id)
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    # GPT-2's unk token is also its eos, so the id alone does not show that a text is unknown.
    unknown = tokenizer.unk_token_id in ids and str(tokenizer.unk_token) not in token
    if len(ids) != 1 or unknown:
        problem = "unknown to it" if unknown else f"{len(ids)} tokens"
        raise ThreestepError(
            f"--end_of_conversation_token expects one token of {named_tokenizer(tokenizer)}, got '{token}', which is "
            f"{problem}; use one of its special tokens, or leave the flag out to use its eos token"
        )
    return int(ids[0])


def token_id(tokenizer: Any, token: str) -> int | None:
    """The id of a token of the vocabulary; None for another text, whose id transformers gives as that of unk, which in
    GPT-2 is eos."""
    index = tokenizer.convert_tokens_to_ids(token)
    return index if index is not None and tokenizer.convert_ids_to_tokens(index) == token else None


def named_tokenizer(tokenizer: Any) -> str:
    """The tokenizer and whose it is, for a message: a run may read several."""
    name = getattr(tokenizer, "name_or_path", None)
    return f"the tokenizer of '{name}'" if name else "the tokenizer"


def require_pad_token(pad_token_id: int | None, what_for: str, tokenizer: str = "the tokenizer") -> int:
    """The id; ThreestepError where the tokenizer, which is named so, has no pad token."""
    if pad_token_id is None:
        raise ThreestepError(
            f"{tokenizer} has no pad token, which {what_for} needs: give it one and save it, for instance "
            "tokenizer.pad_token = tokenizer.eos_token (masks come from lengths, so eos works)"
        )
    return pad_token_id


class Dropped(Exception):
    """Raised for a row that is left out; its text is the reason, by which it is counted."""


class TooLong(Exception):
    """Raised for `truncation: error`; carries the length in tokens."""

    def __init__(self, length_tokens: int) -> None:
        super().__init__(length_tokens)
        self.length_tokens = length_tokens


def fit_sentences(
    prompt_ids: Ids, response_ids: Sequence[Ids], most: int, truncation: str, *, end_id: int | None
) -> tuple[Ids, list[Ids], bool]:
    """Make a prompt with each of its responses at most `most` tokens long; returns both, and whether any was cut.

    `right` cuts the end of the responses; with `end_id` a cut response still ends with it, with None it ends where it
    was cut. `left` cuts the prompt's beginning and `middle` its middle; both leave responses whole. `error` raises
    TooLong. Raises Dropped by `drop`, if a response would be cut to nothing, and if no token of the prompt would be
    left.
    """
    longest = max(len(ids) for ids in response_ids)
    if len(prompt_ids) + longest <= most:
        return prompt_ids, list(response_ids), False
    if truncation == "error":
        raise TooLong(len(prompt_ids) + longest)
    if truncation == "drop":
        raise Dropped("too_long")
    if truncation == "right":
        room = most - len(prompt_ids)
        if room < (1 if end_id is None else 2):
            raise Dropped("response_cut_to_nothing")
        return prompt_ids, [_cut_response(ids, room, end_id) for ids in response_ids], True
    room = most - longest
    if room < 1:
        raise Dropped("no_room_for_the_prompt")
    return cut_prompt(prompt_ids, room, truncation), list(response_ids), True


def _cut_response(ids: Ids, room: int, end_id: int | None) -> Ids:
    if len(ids) <= room:
        return ids
    return ids[:room] if end_id is None else [*ids[: room - 1], end_id]


def cut_prompt(prompt_ids: Ids, most: int, truncation: str) -> Ids:
    """At most `most` ids of a prompt: the last (`left`), the first (`right`), or both ends (`middle`)."""
    if len(prompt_ids) <= most:
        return prompt_ids
    if truncation == "right":
        return prompt_ids[:most]
    head = most // 2 if truncation == "middle" else 0
    return prompt_ids[:head] + prompt_ids[len(prompt_ids) - (most - head) :]
