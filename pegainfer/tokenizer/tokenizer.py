"""`Tokenizer`: text to token ids and back, over a vocabulary of the `tokenizers` library.

Knows which tokens are special and how to keep text from spelling them. Where vocabularies come from is the
business of `files` and `gguf_vocabulary`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import tokenizers

from pegainfer.errors import ConfigError, TokenizerError
from pegainfer.tokenizer.token_bytes import TokenBytes, spelling_of

__all__ = ["Tokenizer", "stop_token_ids"]


class Tokenizer:
    """A loaded tokenizer.

    `named_tokens` are the texts that a chat template may refer to (`bos_token`, `eos_token`, ...);
    `chat_templates` the model's own templates by name (`default`, `tool_use`, ...). `add_bos` forces or
    forbids the beginning-of-sequence token in front of a raw prompt; None leaves it to the vocabulary's own
    rule. Safe to use from several threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.named_tokens = dict(named_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens = {added[i].content: i for i in sorted(self.special_ids)}
        spelling, self._drops_space = spelling_of(backend)
        self._bytes = TokenBytes(backend, spelling, {i: token.content for i, token in added.items()})
        self._prefix = self._own_prefix(add_bos)

    @property
    def bos_token_id(self) -> int | None:
        """Beginning of a sequence, if the model has such a token."""
        return self.token_id(self.named_tokens.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        """End of a sequence, if the model has such a token."""
        return self.token_id(self.named_tokens.get("eos_token"))

    @cached_property
    def decodable_vocab_size(self) -> int:
        """One more than the largest id that has a token; logits may be wider."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        if self._backend.id_to_token(size - 1) is not None and self._backend.id_to_token(size) is None:
            return size
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def max_chars_per_token(self) -> int:
        """Length of the longest token: a text of n characters has at least n / this many tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def token_id(self, text: str | None) -> int | None:
        """The id of the token that is spelt so in the vocabulary."""
        found: int | None = self._backend.token_to_id(text) if text is not None else None
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` puts what the model wants around a raw prompt, and never a second
        beginning-of-sequence token in front of one that the text has itself. Without `parse_special`, text
        that spells a special token is ordinary text.
        """
        backend = self._backend if parse_special else self._plain
        own = add_special_tokens and self._prefix is None
        ids: list[int] = backend.encode(_clean(text), add_special_tokens=own).ids
        if not add_special_tokens:
            return ids
        bos = self.bos_token_id
        if self._prefix:
            ids = [*self._prefix, *ids]
        if bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self._bytes[i] for i in token_ids if i not in skipped).decode("utf-8", "replace")
        return text[1:] if self._drops_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, empty for an id without a token."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """A token alone as text; a part of a character shows as U+FFFD."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def to_json(self) -> str:
        """The vocabulary as a `tokenizer.json`, for libraries that read that."""
        text: str = self._backend.to_str()
        return text

    def _own_prefix(self, add_bos: bool | None) -> list[int] | None:
        """What to put in front of a raw prompt instead of the backend's post-processing; None: keep that."""
        bos = self.bos_token_id
        if add_bos is None or bos is None:
            return None
        has_bos = bos in self._backend.encode("").ids
        if add_bos is has_bos:
            return None
        return [bos] if add_bos else []

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A second backend over the same vocabulary that does not recognise special tokens.

        The switch is state of a backend, so toggling it on the first one would not be safe with threads.
        """
        first = self._backend
        plain = tokenizers.Tokenizer(first.model)
        if first.normalizer is not None:
            plain.normalizer = first.normalizer
        if first.pre_tokenizer is not None:
            plain.pre_tokenizer = first.pre_tokenizer
        if first.post_processor is not None:
            plain.post_processor = first.post_processor
        added = first.get_added_tokens_decoder()
        for _, token in sorted(added.items()):
            (plain.add_special_tokens if token.special else plain.add_tokens)([token])
        if plain.get_added_tokens_decoder().keys() != added.keys():
            plain = tokenizers.Tokenizer.from_str(first.to_str())
        plain.encode_special_tokens = True
        return plain


def stop_token_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Every token that ends an answer, the main one first: those of `generation_config.json`, those of
    `config.json` (outer and text part) and the tokenizer's. Raises `ConfigError` for what is no token id.
    """
    text_config = config.get("text_config")
    sources: list[Mapping[str, Any]] = [generation_config, config]
    if isinstance(text_config, Mapping):
        sources.append(text_config)
    ids: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is None:
                continue
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                raise ConfigError(f"eos_token_id must be a token id or a list of them, got {value!r:.80}")
            ids[item] = None
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids[tokenizer.eos_token_id] = None
    return tuple(ids)


def _clean(text: str) -> str:
    """`text` without lone surrogates, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    except AttributeError:
        raise TokenizerError(f"text to encode must be a string, got {type(text).__name__}") from None
    return text
