"""Every kernel at the real shapes of a model, bound as the engine binds it: microseconds, TB/s, TFLOP/s and
the share of what this GPU does at best (a copy, a read and an 8192^3 product measured in the same run).

    python benchmarks/gpu/kernels.py [CONFIG.json] [--only GROUP ...] [--block-size N] [--out FILE]

Groups:
  matrices    each weight matrix by number of rows; weights rotate, so that they are never in the L2 cache.
              Some numbers of rows run fused with their norm and gate, others run the product alone.
  chain       norms, matrices and gates of all layers and the head, as a step of one token per row has them
  attention   decode over caches that rotate like the weights; prompts; a step of both
  small       norm, rotation with the cache write, gate, embedding, gather, over inputs just written
  sampling    from logits just written

Bytes and FLOP are what must be moved and done, not what a kernel happens to do. `--dry-run` binds and
launches everything on a GPU that is only described, which checks arguments and times nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine
from model_ops import Matrix, Model
from stopwatch import Row, Stopwatch, measure_roofline

from pegainfer.errors import PegaInferError
from pegainfer.kernels.artifacts import PlannedGpu
from pegainfer.ops.activation import silu_and_mul
from pegainfer.ops.attention import paged_attention
from pegainfer.ops.embedding import embedding
from pegainfer.ops.gather import gather_rows
from pegainfer.ops.norm import rms_norm
from pegainfer.ops.op import bind
from pegainfer.ops.rope import qkv_rope_write
from pegainfer.ops.sampling import SamplingFacts, sample
from pegainfer.runtime.cuda.device import make_cuda_device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

CONFIG = Path(__file__).with_name("qwen3-4b.json")
MATRIX_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 8192)
MAX_LOGITS = 1024  # rows: no step computes more logits at once
CHAIN_ROWS = (1, 8, 16, 32, 64)
SMALL_ROWS = (1, 16, 64, 1024, 8192)
SAMPLING_ROWS = (1, 16, 64, 256)
DECODE = ((1, 1024), (1, 16384), (16, 1024), (64, 1024), (64, 4096), (256, 1024))  # requests, context
PREFILL = {  # requests as (new tokens, length)
    **{f"prompt {length}": [(length, length)] for length in (1024, 4096, 8192, 16384)},
    "prompt 8192 after 8192": [(8192, 16384)],
    "16 prompts of 1024": [(1024, 1024)] * 16,
    "63 decode at 1024 + prompt 1024": [(1, 1024)] * 63 + [(1024, 1024)],
}
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
}
MAX_TOP_LOGPROBS = 20
MAX_POSITIONS = 16384


def matrices(model: Model) -> Iterator[Row]:
    """Each matrix, by rows."""
    watch, norm = model.watch, model.vector()
    for name in ("qkv", "o", "gate_up", "down", "lm_head"):
        matrix = model.matrix(name)
        for rows in MATRIX_ROWS:
            if name == "lm_head" and rows > MAX_LOGITS:
                continue
            x = watch.random((rows, matrix.facts.in_features), matrix.facts.act)
            out = watch.random((rows, matrix.columns(rows)), matrix.facts.out_dtype)
            launch = matrix.product
            if matrix.is_fused(rows):
                normed = watch.random(x.shape, matrix.facts.act)
                launch = partial(matrix.fused, norm=norm, normed=normed)
            calls = [partial(launch, x=x, weight=w, out=out, bias=matrix.bias) for w in matrix.weights]
            kind = " fused" if matrix.is_fused(rows) else ""
            yield Row("matrices", f"{name} x{rows}{kind}", *matrix.cost(rows), watch.time(calls))


def chain(model: Model) -> Iterator[Row]:
    """All matrices of a step, in the order of the layers, with norm and gate where they are not fused."""
    watch, gpu, act = model.watch, model.watch.gpu, model.norm.act
    norm, gate, weight = bind(rms_norm, model.norm, gpu), bind(silu_and_mul, model.gate, gpu), model.vector()
    qkv, o, gate_up, down, head = map(model.matrix, ("qkv", "o", "gate_up", "down", "lm_head"))

    def step(
        hidden: Tensor, normed: Tensor, heads: Tensor, mixed: Tensor, wide: Tensor, gated: Tensor
    ) -> None:
        def behind_norm(matrix: Matrix, layer: int, out: Tensor) -> None:
            arguments = {"weight": matrix.weights[layer], "bias": matrix.bias}
            if matrix.is_fused(hidden.shape[0]):
                matrix.fused(x=hidden, norm=weight, normed=normed, out=out, **arguments)
                return
            norm(x=hidden, weight=weight, out=normed)
            matrix.product(x=normed, out=wide if matrix is gate_up else out, **arguments)
            if matrix is gate_up:
                gate(gate_up=wide, out=out)

        for layer in range(model.num_layers):
            behind_norm(qkv, layer, heads)
            o.product(x=mixed, weight=o.weights[layer], out=hidden, bias=o.bias)
            behind_norm(gate_up, layer, gated)
            down.product(x=gated, weight=down.weights[layer], out=hidden, bias=down.bias)
        behind_norm(head, 0, logits)

    for rows in CHAIN_ROWS:
        size, gates = model.norm.size, model.gate.size
        widths = (size, size, qkv.facts.out_features, o.facts.in_features, 2 * gates, gates)
        arrays = [watch.random((rows, width), act) for width in widths]
        logits = watch.random((rows, model.vocab_size), DType.float32)
        costs = [model.num_layers * np.array(m.cost(rows)) for m in (qkv, o, gate_up, down)]
        nbytes, flop = (int(total) for total in sum(costs, np.array(head.cost(rows))))
        yield Row("chain", f"x{rows}", nbytes, flop, watch.time([partial(step, *arrays)], least=1))


def attention(model: Model) -> Iterator[Row]:
    """One layer's attention: decode, prompts, both."""
    cases = {f"decode {count} x {length}": [(1, length)] * count for count, length in DECODE}
    launch = bind(paged_attention, model.attention, model.watch.gpu)
    for case, requests in (cases | PREFILL).items():
        yield attend(model, launch, case, requests)


def attend(model: Model, launch: Any, case: str, requests: list[tuple[int, int]]) -> Row:
    """`requests` as (new tokens, length), over a cache laid out as the engine's: a block has all layers."""
    watch, facts = model.watch, model.attention
    block, part = facts.block_size, model.rope.block_bytes
    counts = [-(-length // block) for _, length in requests]
    of_layer = sum(counts) * part
    cold = max(watch.copies(of_layer), 2)
    fitting = int(watch.gpu.memory_info().available * 0.6) // of_layer
    layers = max(min(max(model.num_layers, cold), fitting), 1)
    cache = watch.random_bytes(layers * of_layer, facts.kv_dtype, std=1.0)
    tables = np.zeros((len(requests), max(counts)), np.int32)
    free = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    for table, count in zip(tables, counts, strict=True):
        table[:count], free = free[:count], free[count:]
    new, lengths = (np.array(column, np.int32) for column in zip(*requests, strict=True))
    rows, width = int(new.sum()), facts.num_heads * facts.head_dim
    q, out = (watch.random((rows, width), facts.act) for _ in range(2))
    arguments = {
        "q": q,
        "kv_block_stride": layers * part,
        "block_tables": watch.gpu.from_numpy(tables),
        "query_start_loc": watch.gpu.from_numpy(np.cumsum([0, *new]).astype(np.int32)),
        "seq_lens": watch.gpu.from_numpy(lengths),
        "num_decodes": next((r for r, (count, _) in enumerate(requests) if count > 1), len(requests)),
        "out": out,
    }
    calls = []
    for start in range(0, min(layers, cold) * part, part):
        view = Tensor(cache.storage, DType.uint8, (cache.nbytes - start,), offset=start)
        calls.append(partial(launch, kv=view, **arguments))
    seen = sum(n * (length - n) + n * (n + 1) // 2 for n, length in requests)  # pairs of query and key
    flop = 4 * width * seen
    moved = int(lengths.sum()) * (part // block) + q.nbytes + out.nbytes
    return Row("attention", case, moved, flop, watch.time(calls))


def small(model: Model) -> Iterator[Row]:
    """The kernels between the matrices, by rows."""
    watch, gpu, act, rope = model.watch, model.watch.gpu, model.norm.act, model.rope
    table, weight = model.matrix("lm_head").weights[0], model.vector()
    head_norm = watch.random((rope.head_dim,), DType.float32) if rope.qk_norm else None
    cos_sin = watch.random((MAX_POSITIONS, rope.rotary_dim), DType.float32)
    part, (wide, width) = (
        rope.block_bytes,
        (heads * rope.head_dim for heads in (rope.num_heads + 2 * rope.num_kv_heads, rope.num_heads)),
    )
    launch = {
        "rms_norm": bind(rms_norm, model.norm, gpu),
        "qkv_rope_write": bind(qkv_rope_write, rope, gpu),
        "silu_and_mul": bind(silu_and_mul, model.gate, gpu),
        "embedding": bind(embedding, model.embedding, gpu),
        "gather_rows": bind(gather_rows, model.gather, gpu),
    }
    for rows in SMALL_ROWS:
        rng = np.random.default_rng(rows)
        order = gpu.from_numpy(rng.permutation(rows).astype(np.int32))
        hidden, out = (watch.random((rows, model.norm.size), act) for _ in range(2))
        kv = watch.random_bytes(-(-rows // rope.block_size) * model.num_layers * part, rope.kv_dtype)
        qkv, queries = watch.random((rows, wide), act), watch.random((rows, width), act)
        gate_up, gated = (watch.random((rows, size * model.gate.size), act) for size in (2, 1))
        ids = gpu.from_numpy(rng.integers(0, model.vocab_size, rows).astype(np.int32))
        written = {"kv": kv, "kv_block_stride": model.num_layers * part, "slot_mapping": order}
        norms = {"q_norm": head_norm, "k_norm": head_norm}
        stream = 2 * hidden.nbytes
        cases: dict[str, tuple[int, dict[str, Any]]] = {
            "rms_norm": (stream, {"x": hidden, "weight": weight, "out": out}),
            "qkv_rope_write": (
                2 * qkv.nbytes + rows * rope.rotary_dim * 4,
                {"qkv": qkv, "positions": order, "cos_sin": cos_sin, "out": queries, **norms, **written},
            ),
            "silu_and_mul": (gate_up.nbytes + gated.nbytes, {"gate_up": gate_up, "out": gated}),
            "embedding": (stream, {"token_ids": ids, "weight": table, "out": out}),
            "gather_rows": (stream, {"x": hidden, "indices": order, "out": out}),
        }
        for name, (nbytes, arguments) in cases.items():
            us = watch.time([partial(launch[name], **arguments)])
            yield Row("small", f"{name} x{rows}", nbytes, 0, us)


def sampling(model: Model) -> Iterator[Row]:
    """One draw a row, by how it is drawn."""
    watch, gpu = model.watch, model.watch.gpu
    facts = SamplingFacts(model.vocab_size, model.vocab_size, MAX_TOP_LOGPROBS)
    launch = bind(sample, facts, gpu)
    defaults = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0, "num_logprobs": -1}
    int32 = ("top_k", "prompt_lens", "num_logprobs", "sampled", "ranks")
    float32 = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition", "logprobs")
    for rows in SAMPLING_ROWS:
        logits = watch.random((rows, model.vocab_size), DType.float32, std=3.0)
        rest = {
            "seeds": np.arange(rows, dtype=np.uint64),
            "counters": np.zeros(rows, np.int64),
            **{f"{name}_start": np.zeros(rows + 1, np.int32) for name in ("history", "bias")},
            **{name: np.zeros(1, np.int32) for name in ("history", "bias_ids")},
            "bias_values": np.zeros(1, np.float32),
            "top_ids": np.zeros((rows, MAX_TOP_LOGPROBS), np.int32),
            "top_logprobs": np.zeros((rows, MAX_TOP_LOGPROBS), np.float32),
        }
        for case, parameters in SAMPLING.items():
            values = defaults | parameters
            arrays = rest | {name: np.full(rows, values.get(name, 0), np.int32) for name in int32}
            arrays |= {name: np.full(rows, values.get(name, 0), np.float32) for name in float32}
            arguments = {name: gpu.from_numpy(array) for name, array in arrays.items()}
            us = watch.time([partial(launch, logits=logits, allowed=None, **arguments)])
            yield Row("sampling", f"{case} x{rows}", logits.nbytes, 0, us)


GROUPS = {"matrices": matrices, "chain": chain, "attention": attention, "small": small, "sampling": sampling}


def main() -> int:
    """Time the groups, print the table, write the snapshot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, nargs="?", default=CONFIG)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--block-size", type=int, help="tokens per KV block, if not the usual number")
    parser.add_argument("--out", type=Path, help="write the rows and the roofline here (JSON)")
    parser.add_argument("--dry-run", action="store_true", help="bind and launch on a GPU that is not there")
    parser.add_argument("--arch", default="sm_90a", help="architecture of the dry run")
    options = parser.parse_args()
    if not options.config.is_file():
        parser.error(f"{options.config} is no file; give a model's config.json")
    if options.dry_run and options.out:
        parser.error("a dry run measures nothing that could be written")
    watch = Stopwatch(PlannedGpu(options.arch) if options.dry_run else make_cuda_device())
    model = Model.read(options.config, watch, block_size=options.block_size)
    roofline = measure_roofline(watch)
    if roofline is not None:
        print(f"{watch.gpu.name}: {roofline}", flush=True)
    print(f"{'':45} {'us':>10} {'TB/s':>7} {'TFLOP/s':>8} {'roofline':>9}")
    rows = []
    for group in options.only:
        for row in GROUPS[group](model):
            rows.append(facts := row.facts(roofline))
            label = f"{row.group:10} {row.case:34}"
            if row.us is None:
                print(f"{label} {row.nbytes} bytes, {row.flop} FLOP", flush=True)
                continue
            print(
                f"{label} {facts['us']:10.2f} {facts['tb_s']:7.3f} {facts['tflop_s']:8.1f}"
                f" {facts['roofline_share']:9.1%}",
                flush=True,
            )
    if options.out:
        head = {
            "config": options.config.stem,
            **describe_machine(),
            "roofline": asdict(roofline) if roofline else None,
        }
        options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
        print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PegaInferError, json.JSONDecodeError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
