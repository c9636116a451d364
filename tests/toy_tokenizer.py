"""A small byte-level BPE tokenizer: ids 0 to 255 are the bytes, then a few merges, then special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from pegainfer.tokenizer.token_bytes import byte_level_alphabet
from pegainfer.tokenizer.tokenizer import Tokenizer

__all__ = ["CHATML", "SPECIALS", "make_backend", "make_toy", "write_toy"]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"))


def make_backend(*, bos: str | None = None, plain_added: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """The tokenizer of the library; with `bos` it puts that token in front of raw prompts."""
    alphabet = byte_level_alphabet()
    tokens = [alphabet[byte] for byte in range(256)] + [left + right for left, right in _MERGES]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain_added])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


def make_toy(
    *, template: str | None = CHATML, bos: str | None = None, plain_added: Sequence[str] = ()
) -> Tokenizer:
    """The toy as our `Tokenizer`."""
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | ({"bos_token": bos} if bos else {})
    templates = {} if template is None else {"default": template}
    backend = make_backend(bos=bos, plain_added=plain_added)
    return Tokenizer(backend, named_tokens=named, chat_templates=templates)


def write_toy(directory: Path, *, template: str | None = CHATML) -> None:
    """The toy as the files of a model directory."""
    make_backend().save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
