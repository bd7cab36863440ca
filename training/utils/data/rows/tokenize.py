"""Texts become ids: those of the whole text of a row, so that masks are derived from them.

A row's text is never tokenized in pieces, which would give other ids than the tokenizer gives for the text: a
SentencePiece tokenizer puts a space token before each piece. The ids are cut where a response begins and ends. One
end-of-conversation token ends each response in all phases. Knows nothing of rows, files or phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np

from training.utils.base.errors import ThreestepError

Ids = list[int]


@dataclass(slots=True)
class EncodedParts:
    """Ids of the parts of a row. crosses: a token holds characters of a prompt and of its response, and counts as the
    response's."""

    parts: list[Ids]
    crosses: bool = False


class _Edge(NamedTuple):
    """A place between two parts of a text. at: characters before it. opens: a response begins here."""

    at: int
    opens: bool


class TextTokenizer:
    """A tokenizer with the ids before a prompt, and the id that ends a response."""

    def __init__(self, tokenizer: Any, end_of_conversation_token: str | None) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend_that_agrees(tokenizer)
        self.prefix_ids: Ids = _ids_before_text(tokenizer)
        self.end_id: int = end_of_conversation_id(tokenizer, end_of_conversation_token)
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        self.special: dict[int, str] = {number: token.content for number, token in added if token.special}
        self.special[self.end_id] = tokenizer.convert_ids_to_tokens(self.end_id)
        # Tokens that a text is split at first; where one takes blanks beside it along, these are not a response's.
        self._added_ids = frozenset(number for number, _ in added)

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

    def encode_sentences(self, prompts: Sequence[str], responses: Sequence[Sequence[str]]) -> list[EncodedParts]:
        """Ids of each prompt as by `encode_prompts`, and of its responses, each ended once by the end-of-conversation
        token. A prompt and a response have the ids of their whole text; see `encode_answers`."""
        encoded = self.encode_answers(prompts, responses)
        for row in encoded:
            prompt, *answers = row.parts
            ended = [ids if ids and ids[-1] == self.end_id else [*ids, self.end_id] for ids in answers]
            row.parts = [self.prefix_ids + prompt, *ended]
        return encoded

    def encode_answers(self, prompts: Sequence[str], answers: Sequence[Sequence[str]]) -> list[EncodedParts]:
        """Ids of each prompt and of what may follow it: the prompt with any of its answers has the ids of the whole
        text. They share the tokens before the first one that is another's, or crosses into an answer."""
        rows = [(prompt, answer) for prompt, own in zip(prompts, answers, strict=True) for answer in own]
        wholes = iter(self.encode_parts(rows, [(False, True)] * len(rows)))
        encoded = []
        for own in answers:
            parts = [next(wholes) for _ in own]
            firsts = [each.parts[0] for each in parts]
            shared: Ids = list(commonprefix(firsts))
            rests = [first[len(shared) :] + rest for first, rest in (each.parts for each in parts)]
            encoded.append(EncodedParts([shared, *rests], any(each.crosses for each in parts)))
        return encoded

    def encode_parts(
        self, rows: Sequence[Sequence[str]], are_responses: Sequence[Sequence[bool]]
    ) -> list[EncodedParts]:
        """Ids of texts in parts, which one after the other are the ids of the whole text, without special tokens around
        it. A token across the edge of a response is the response's, unless it is an added one."""
        texts = ["".join(parts) for parts in rows]
        edges = [
            [
                _Edge(at, after and not before)
                for at, before, after in zip(accumulate(map(len, parts[:-1])), own, own[1:], strict=False)
            ]
            for parts, own in zip(rows, are_responses, strict=True)
        ]
        if self._backend is None:
            return self._cut_by_prefixes(texts, edges)
        encodings = _encode_with_offsets(self._tokenizer, self._backend, texts)
        return [self._cut(each.ids, each.offsets, own) for each, own in zip(encodings, edges, strict=True)]

    def _cut(self, ids: Ids, offsets: Sequence[tuple[int, int]], edges: Sequence[_Edge]) -> EncodedParts:
        begins = np.fromiter((begin for begin, _ in offsets), np.int64, len(offsets))
        cuts, crosses = [0], False
        for edge, found in zip(edges, np.searchsorted(begins, [edge.at for edge in edges]).tolist(), strict=True):
            cut = found
            while edge.opens and cut > cuts[-1] and offsets[cut - 1][1] > edge.at:
                if ids[cut - 1] in self._added_ids:
                    break
                cut, crosses = cut - 1, True
            cuts.append(max(cut, cuts[-1]))
        return EncodedParts([ids[a:b] for a, b in zip(cuts, [*cuts[1:], len(ids)], strict=True)], crosses)

    def _cut_by_prefixes(self, texts: Sequence[str], edges: Sequence[Sequence[_Edge]]) -> list[EncodedParts]:
        """As `_cut`, for a tokenizer that does not say which characters a token is made of: the ids before an edge are
        those that the text before it begins with, too."""
        wholes = self._encode(texts)
        before = iter(self._encode([text[: edge.at] for text, own in zip(texts, edges, strict=True) for edge in own]))
        encoded = []
        for ids, own in zip(wholes, edges, strict=True):
            cuts, crosses = [0], False
            for edge in own:
                alone = next(before)
                cut = len(commonprefix([ids, alone]))
                if cut < len(alone) and edge.opens:
                    crosses = True
                elif cut < len(alone):
                    cut += 1
                cuts.append(max(cut, cuts[-1]))
            parts = [ids[a:b] for a, b in zip(cuts, [*cuts[1:], len(ids)], strict=True)]
            encoded.append(EncodedParts(parts, crosses))
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


def _encode_with_offsets(tokenizer: Any, backend: Any, texts: list[str]) -> list[Any]:
    """The Rust tokenizer's encodings, with the characters [begin, end) that each token is made of."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    # A ByteLevel post-processor trims blanks off a token's characters (`trim_offsets`), GPT-2's and Llama 3's do.
    processor = backend.post_processor
    backend.post_processor = None
    try:
        return backend.encode_batch(texts, add_special_tokens=False)
    finally:
        backend.post_processor = processor


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
                f"{named_tokenizer(tokenizer)} has no eos token to end a response with; set "
                "--end_of_conversation_token to one of its tokens"
            )
        return int(tokenizer.eos_token_id)
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    # GPT-2's unk token is also its eos, so the id alone does not show that a text is unknown.
    unknown = tokenizer.unk_token_id in ids and str(tokenizer.unk_token) not in token
    if len(ids) != 1 or unknown:
        problem = "unknown to it" if unknown else f"{len(ids)} tokens"
        raise ThreestepError(
            f"--end_of_conversation_token expects one token of {named_tokenizer(tokenizer)}, got '{token}', which is "
            f"{problem}; use one of its special tokens, or remove the flag to use its eos token"
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
            f"{tokenizer} has no pad token, which {what_for} needs; set one and save it, for example "
            "tokenizer.pad_token = tokenizer.eos_token (eos works, because masks come from lengths)"
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
    prompt_tokens: int, response_ids: Sequence[Ids], most: int, truncation: str, *, end_id: int
) -> tuple[Sequence[int], list[Ids], bool]:
    """Make a prompt with each of its responses at most `most` tokens long; returns the places of the prompt's tokens
    that stay, the responses, and whether any was cut.

    `right` cuts the end of the responses; a cut response still ends with `end_id`. `left` cuts the prompt's beginning
    and `middle` its middle; both leave responses whole. `error` raises TooLong. Raises Dropped by `drop`, if a response
    would be cut to nothing, and if no token of the prompt would be left.
    """
    longest = max(len(ids) for ids in response_ids)
    places, room = _fit(prompt_tokens, longest, most, truncation)
    if room == longest:
        return places, list(response_ids), len(places) < prompt_tokens
    if room < 2:
        raise Dropped("response_cut_to_nothing")
    return places, [ids if len(ids) <= room else [*ids[: room - 1], end_id] for ids in response_ids], True


def fit_conversation(loss: Sequence[bool], last_turn: int, most: int, truncation: str) -> Sequence[int]:
    """The places of a conversation's tokens that stay, at most `most`.

    loss: whether each token carries loss. last_turn: where the last turn begins that does. `right` cuts the end. `left`
    cuts the beginning and `middle` the middle of what precedes that turn; both leave it whole. `error` raises TooLong.
    Raises Dropped by `drop`, and if no token that carries loss, or none before the last turn, would be left.
    """
    places, room = _fit(last_turn, len(loss) - last_turn, most, truncation)
    if last_turn + room == len(loss):
        return [*places, *range(last_turn, len(loss))]
    if not any(loss[1:most]):
        raise Dropped("response_cut_to_nothing")
    return range(most)


def _fit(prompt_tokens: int, response_tokens: int, most: int, truncation: str) -> tuple[Sequence[int], int]:
    """The places of a prompt's tokens that stay, and how many tokens of the response; the latter may be negative."""
    room = most - response_tokens
    if prompt_tokens <= room:
        return range(prompt_tokens), response_tokens
    if truncation == "error":
        raise TooLong(prompt_tokens + response_tokens)
    if truncation == "drop":
        raise Dropped("too_long")
    if truncation == "right":
        return range(prompt_tokens), most - prompt_tokens
    if room < 1:
        raise Dropped("no_room_for_the_prompt")
    return cut_prompt(prompt_tokens, room, truncation), response_tokens


def cut_prompt(prompt_tokens: int, most: int, truncation: str) -> Sequence[int]:
    """The places of at most `most` tokens of a prompt: the last (`left`), the first (`right`), or both (`middle`)."""
    if prompt_tokens <= most:
        return range(prompt_tokens)
    if truncation == "right":
        return range(most)
    head = most // 2 if truncation == "middle" else 0
    return [*range(head), *range(prompt_tokens - (most - head), prompt_tokens)]
