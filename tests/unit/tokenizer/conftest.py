"""The built-in model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.tokenizer.gguf_vocabulary import tokenizer_from_gguf
from pegainfer.tokenizer.tokenizer import Tokenizer
from pegainfer.weights.gguf import GgufFile


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return tokenizer_from_gguf(GgufFile(smollm2).metadata, where=smollm2)
