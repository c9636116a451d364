"""Sampling flags of the commands that generate text. What is not given stays the model's own default."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pegainfer.config import option

__all__ = ["SamplingOptions"]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen, and when to stop. None is the default of the model."""

    temperature: float | None = option(None, "0 takes the most likely token; higher is more random.")
    top_p: float | None = option(None, "Sample from the smallest set of tokens with this probability.")
    top_k: int | None = option(None, "Sample from this many most likely tokens; 0: from all.")
    min_p: float | None = option(None, "Least probability relative to the most likely token.")
    max_tokens: int | None = option(None, "Most tokens to generate; to the context's end by default.")
    min_tokens: int | None = option(None, "Least tokens to generate.")
    repetition_penalty: float | None = option(None, "Above 1 discourages tokens that occurred.")
    presence_penalty: float | None = option(None, "Subtracted from tokens that were generated.")
    frequency_penalty: float | None = option(None, "Subtracted once per time a token was generated.")
    stop: tuple[str, ...] = option((), "Texts that end the output.", kind="list", metavar="TEXT")
    ignore_eos: bool = option(False, "Do not stop at the end-of-sequence token.")

    def given(self) -> dict[str, Any]:
        """The values that differ from the model's defaults, by their names in requests."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        # By identity: 0 and 0.0 equal False, and mean something.
        return {
            name: value for name, value in fields if value is not None and value is not False and value != ()
        }
