"""Prompts beside answers under way: a step that decodes is kept short."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.scheduler.policy import SchedulerSettings, prompt_budget
from tests.unit.scheduler.paged_worker import Driver


def settings(**changes: Any) -> SchedulerSettings:
    values = {
        "max_model_len": 64,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 32,
        "max_num_mixed_tokens": 8,
    }
    return SchedulerSettings(**(values | changes))


def test_without_decodes_prompts_take_the_whole_step() -> None:
    assert prompt_budget(0, 32, settings()) == 32


def test_decodes_count_towards_the_limit() -> None:
    assert prompt_budget(1, 31, settings()) == 7
    assert prompt_budget(3, 29, settings()) == 5


def test_many_decodes_leave_prompts_a_share() -> None:
    assert prompt_budget(8, 24, settings()) == 2
    assert prompt_budget(31, 1, settings()) == 1
    assert prompt_budget(32, 0, settings()) == 0
    assert prompt_budget(5, 27, settings(max_num_mixed_tokens=1)) == 1


@pytest.mark.parametrize("changes", [{"max_num_mixed_tokens": None}, {"enable_chunked_prefill": False}])
def test_there_may_be_no_limit(changes: dict[str, Any]) -> None:
    assert prompt_budget(3, 29, settings(**changes)) == 29


def test_a_long_prompt_is_cut_shorter_once_an_answer_is_under_way() -> None:
    driver = Driver(max_num_batched_tokens=24, max_num_mixed_tokens=8)
    driver.add("first", list(range(20)), max_tokens=12)
    assert driver.step().num_tokens == 20  # type: ignore[union-attr]
    driver.add("second", list(range(40, 80)), max_tokens=2)
    plans = [driver.step() for _ in range(6)]
    assert [[entry.num_tokens for entry in plan.scheduled] for plan in plans if plan] == [[1, 7]] * 5 + [
        [1, 5]
    ]
    driver.run()
    driver.check_text()


def test_a_long_prompt_without_chunks_is_computed_at_once() -> None:
    driver = Driver(max_num_batched_tokens=24, max_num_mixed_tokens=8, enable_chunked_prefill=False)
    driver.add("first", list(range(20)), max_tokens=12)
    driver.step()
    driver.add("second", list(range(40, 60)), max_tokens=2)
    plan = driver.step()
    assert plan is not None
    assert [entry.num_tokens for entry in plan.scheduled] == [1, 20]
    driver.run()
    driver.check_text()
