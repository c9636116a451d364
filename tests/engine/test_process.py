"""The engine in a process of its own: life, death, stalls, slow readers. Real processes and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pegainfer.config import EngineConfig
from pegainfer.engine.client import EngineClient, EngineHealth
from pegainfer.engine.inputs import RequestLimits, make_requests
from pegainfer.engine.launch import launch_engine
from pegainfer.engine.messages import AddRequest, FinishReason
from pegainfer.errors import EngineDeadError, PegaInferError, RequestError
from pegainfer.sampling_params import SamplingParams
from tests.engine.engines import add_request, drain, engine, run, start, tokens_of


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether `condition()` comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_requests_are_served_and_the_engine_leaves_with_0() -> None:
    async def main() -> None:
        async with engine() as client:
            assert client.health(1.0) is EngineHealth.healthy
            first, second = start(client, [1, 2, 3], max_tokens=20), start(client, [4], max_tokens=10)
            updates, others = await asyncio.gather(drain(first), drain(second))
            assert (len(tokens_of(updates)), len(tokens_of(others))) == (20, 10)
            assert updates[-1].finish_reason is FinishReason.length
            assert client.num_open == 0
            pid = client.pid
            assert await client.shutdown() == 0
            assert not psutil.pid_exists(pid)
            with pytest.raises(EngineDeadError):
                start(client, [1])

    run(main)


def test_a_group_of_requests_comes_in_batches() -> None:
    async def main() -> None:
        async with engine() as client:
            limits = RequestLimits(client.info.vocab_size, 512, 10_000)
            params = SamplingParams(n=3, temperature=1.0, max_tokens=8, ignore_eos=True)
            requests = make_requests("r", [1, 2], params, limits=limits)
            counts = dict.fromkeys((request.request_id for request in requests), 0)
            async for batch in client.generate(requests):
                names = [update.request_id for update in batch]
                assert len(set(names)) == len(names)
                for update in batch:
                    counts[update.request_id] += len(update.token_ids)
            assert set(counts.values()) == {8}

    run(main)


def test_an_id_in_use_is_refused() -> None:
    async def main() -> None:
        async with engine() as client:
            with client.generate([add_request([1], "same", max_tokens=1000)]), pytest.raises(RequestError):
                client.generate([add_request([2], "same")])
            assert client.num_open == 0

    run(main)


def test_t12_leaving_a_generation_frees_everything() -> None:
    async def main() -> None:
        async with engine() as client:
            with start(client, list(range(100)), max_tokens=4096) as generation:
                async for _ in generation:
                    break
            assert client.num_open == 0
            assert await until(
                lambda: client.stats.num_running == 0 and client.stats.kv_cache_usage == 0.0, 1.0
            )

    run(main)


def test_t13_an_abort_storm_from_outside() -> None:
    async def one(client: EngineClient, index: int) -> None:
        generation = start(client, list(range(index % 60 + 1)), max_tokens=200)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(drain(generation), (index * 37 % 100) / 500)
        generation.close()
        generation.close()
        client.drop(["unknown"])

    async def main() -> None:
        async with engine(max_num_seqs=64) as client:
            await asyncio.gather(*(one(client, index) for index in range(200)))
            assert client.num_open == 0
            assert len(tokens_of(await drain(start(client, [1], max_tokens=5)))) == 5
            assert await until(lambda: client.stats.kv_cache_usage == 0.0)

    run(main)


def test_a_killed_engine_is_noticed_at_once() -> None:
    async def main() -> None:
        async with engine() as client:
            waiting = [asyncio.create_task(drain(start(client, [i], max_tokens=8000))) for i in range(3)]
            await until(lambda: client.stats.generation_tokens > 10)
            begin = time.monotonic()
            os.kill(client.pid, signal.SIGKILL)
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert time.monotonic() - begin < 1.0
            assert all(isinstance(result, EngineDeadError) for result in results)
            assert "signal 9" in str(results[0])
            await asyncio.wait_for(client.died(), 1.0)
            assert client.health(30.0) is EngineHealth.dead
            with pytest.raises(EngineDeadError):
                start(client, [1])
            assert await client.close() == -signal.SIGKILL

    run(main)


def test_t24_a_stopped_engine_is_stalled_and_recovers() -> None:
    async def main() -> None:
        async with engine() as client:
            assert client.health(0.3) is EngineHealth.healthy
            with start(client, [1], max_tokens=8000):
                await until(lambda: client.stats.generation_tokens > 3)
                os.kill(client.pid, signal.SIGSTOP)
                try:
                    assert await until(lambda: client.health(0.5) is EngineHealth.stalled, 2.0)
                finally:
                    os.kill(client.pid, signal.SIGCONT)
                assert await until(lambda: client.health(0.5) is EngineHealth.healthy, 2.0)

    run(main)


def test_t24_a_hung_step_is_a_stall_although_the_process_lives() -> None:
    async def main() -> None:
        async with engine(sim_ttft_ms=2000.0) as client:
            assert client.health(0.3) is EngineHealth.healthy
            with start(client, [1], max_tokens=5):
                assert await until(lambda: client.health(0.5) is EngineHealth.stalled, 2.0)

    run(main)


def test_an_idle_engine_is_healthy_and_sleeps() -> None:
    async def main() -> None:
        async with engine() as client:
            await drain(start(client, [1], max_tokens=2))
            process = psutil.Process(client.pid)
            before = sum(process.cpu_times()[:2])
            await asyncio.sleep(1.5)
            assert sum(process.cpu_times()[:2]) - before < 0.1
            assert client.health(0.5) is EngineHealth.healthy

    run(main)


def test_t27_a_slow_reader_holds_nobody_up() -> None:
    async def main() -> None:
        async with engine(sim_tpot_ms=0.5) as client:
            slow, fast = start(client, [1], max_tokens=2000), start(client, [2], max_tokens=300)
            gaps, last = [], time.monotonic()
            async for _ in fast:
                now = time.monotonic()
                gaps.append(now - last)
                last = now
            await asyncio.sleep(0.3)
            items = 0
            tokens = 0
            async for (update,) in slow:
                items += 1
                tokens += len(update.token_ids)
                await asyncio.sleep(0.1)
            assert sorted(gaps)[len(gaps) // 2] < 0.05
            assert tokens == 2000
            assert items < 50  # what was missed came merged

    run(main)


def test_merged_updates_keep_the_facts_of_first_and_last() -> None:
    async def main() -> None:
        async with engine() as client:
            prompt = list(range(40))
            await drain(start(client, prompt, max_tokens=1))
            generation = start(client, prompt, max_tokens=5, logprobs=1)
            await until(lambda: client.num_open == 0)
            ((update,),) = [batch async for batch in generation]
            assert len(update.token_ids) == len(update.logprobs or ()) == 5
            assert (update.num_cached_tokens, update.finish_reason) == (32, FinishReason.length)

    run(main)


def test_shutdown_ends_open_requests_and_drain_lets_them_finish() -> None:
    async def main() -> None:
        async with engine() as client:
            long = asyncio.create_task(drain(start(client, [1], max_tokens=8000)))
            await until(lambda: client.stats.generation_tokens > 0)
            assert await client.shutdown(drain=0.1) == 0
            assert (await long)[-1].finish_reason is FinishReason.abort
        async with engine() as client:
            short = asyncio.create_task(drain(start(client, [1], max_tokens=50)))
            await asyncio.sleep(0)
            assert await client.shutdown(drain=30.0) == 0
            assert len(tokens_of(await short)) == 50

    run(main)


def test_signals_are_the_parents_business() -> None:
    async def main() -> None:
        async with engine() as client:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(client.pid, number)
            assert len(tokens_of(await drain(start(client, [1], max_tokens=5)))) == 5

    run(main)


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"load_format": "gguf"}])
def test_a_wrong_setting_is_one_sentence(options: dict[str, object]) -> None:
    async def main() -> None:
        config = EngineConfig.from_flat(
            model="tests/golden/llama_smol",
            skip_tokenizer_init=True,
            **options,
        )
        with pytest.raises(PegaInferError) as caught:
            await launch_engine(config)
        assert not isinstance(caught.value, EngineDeadError)
        assert "\n" not in str(caught.value)

    run(main)


def test_a_model_that_is_not_there_starts_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        before = set(psutil.Process().children(recursive=True))
        with pytest.raises(PegaInferError, match="no existing directory"):
            await launch_engine(EngineConfig.from_flat(model=str(tmp_path / "nothing")))
        assert set(psutil.Process().children(recursive=True)) <= before

    run(main)


def test_an_unreadable_request_fails_alone() -> None:
    async def main() -> None:
        async with engine() as client:
            good = asyncio.create_task(drain(start(client, [1], max_tokens=50)))
            bad = client.generate([AddRequest("bad", ["x"], SamplingParams())])
            (update,) = await drain(bad)
            assert (update.finish_reason, update.error_status) == (FinishReason.error, 500)
            assert len(tokens_of(await good)) == 50

    run(main)


def test_a_dead_parent_takes_the_engine_along(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio
            from tests.engine.engines import engine

            async def main():
                async with engine() as client:
                    print(client.pid, client._process._directory, flush=True)
                    await asyncio.sleep(60)

            asyncio.run(main())
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().decode().split()
        child = psutil.Process(int(pid))
        assert Path(directory).exists()
        parent.kill()
    deadline = time.monotonic() + 3.0
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not Path(directory).exists()
