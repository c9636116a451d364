"""The Qwen3 decoder in PyTorch, float32 throughout, without a cache: what the accuracy gate compares with.

Weights are widened layer by layer, so a model needs little more memory than its largest layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from pegainfer.config import LoadOptions, ModelOptions
from pegainfer.weights.loader import open_checkpoint

__all__ = ["reference_logprobs"]


class Reference:
    """A checkpoint's decoder on `device`."""

    def __init__(self, model: Path, device: str) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        self._checkpoint = open_checkpoint(ModelOptions(model=str(model)), LoadOptions())
        self._config = self._checkpoint.config
        self._device = device

    def weight(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint as float32."""
        return torch.from_numpy(self._checkpoint.get(name).dequantize()).to(self._device)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Log-probabilities of the token after each position: float32 `[length, vocab_size]` a sequence."""
        config = self._config
        embedding = self.weight("model.embed_tokens.weight")
        hidden = [embedding[torch.tensor(ids, device=self._device)] for ids in sequences]
        for layer in range(config["num_hidden_layers"]):
            hidden = self._layer(f"model.layers.{layer}", hidden)
        norm = self.weight("model.norm.weight")
        head = embedding if config["tie_word_embeddings"] else self.weight("lm_head.weight")
        return [torch.log_softmax(self._norm(x, norm) @ head.T, -1) for x in hidden]

    def _layer(self, name: str, hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        before, after = (
            self.weight(f"{name}.{norm}.weight") for norm in ("input_layernorm", "post_attention_layernorm")
        )
        query, key, value, output = (self.weight(f"{name}.self_attn.{part}_proj.weight") for part in "qkvo")
        q_norm, k_norm = (self.weight(f"{name}.self_attn.{part}_norm.weight") for part in "qk")
        gate, up, down = (self.weight(f"{name}.mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
        result = []
        for x in hidden:
            normed = self._norm(x, before)
            q, k, v = (self._heads(normed @ weight.T) for weight in (query, key, value))
            q, k = self._rotate(self._norm(q, q_norm)), self._rotate(self._norm(k, k_norm))
            group = q.shape[0] // k.shape[0]
            mixed = functional.scaled_dot_product_attention(
                q[None],
                k.repeat_interleave(group, 0)[None],
                v.repeat_interleave(group, 0)[None],
                is_causal=True,
            )[0]
            x = x + mixed.transpose(0, 1).flatten(1) @ output.T
            normed = self._norm(x, after)
            result.append(x + (functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T)
        return result

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """`[length, heads * head_dim]` as `[heads, length, head_dim]`."""
        return x.unflatten(-1, (-1, self._config["head_dim"])).transpose(0, 1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]) * weight

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        exponents = torch.arange(half, device=x.device, dtype=torch.float64) / half
        positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float64)
        angles = positions[:, None] * float(self._config["rope_theta"]) ** -exponents
        cosine, sine = angles.cos().float(), angles.sin().float()
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)


@torch.inference_mode()
def reference_logprobs(model: Path, sequences: Sequence[Sequence[int]], device: str) -> list[torch.Tensor]:
    """Log-probabilities of the token after each position of each sequence, `[length, vocab_size]`."""
    return Reference(model, device).logprobs(sequences)
