"""Accounts of requests."""

from __future__ import annotations

import pytest

from pegainfer.errors import RequestError
from pegainfer.scheduler.ledger import Ledger, LedgerError
from pegainfer.scheduler.plan import FinishReason, RequestUpdate


def test_times_and_counts_come_with_the_first_token_and_the_end() -> None:
    ledger = Ledger()
    ledger.open("a", 7, now=10.0)
    ledger.schedule("a", num_cached_tokens=4, now=12.0)
    first = ledger.report("a", [5], now=15.0)
    assert first == RequestUpdate("a", [5], num_cached_tokens=4, queued_s=2.0, prefill_s=3.0)
    ledger.preempt("a")
    ledger.schedule("a", num_cached_tokens=0, now=99.0)
    assert ledger.report("a", [6], now=16.0) == RequestUpdate("a", [6])
    assert ledger.report("a", [7], now=20.0, finish_reason=FinishReason.length) == RequestUpdate(
        "a", [7], None, None, FinishReason.length,
        num_cached_tokens=4, num_preemptions=1, queued_s=2.0, prefill_s=3.0, decode_s=5.0,
    )  # fmt: skip
    assert (ledger.prompt_tokens, ledger.generation_tokens, ledger.num_preemptions) == (7, 3, 1)
    assert ledger.finished[FinishReason.length] == 1
    assert len(ledger) == 0


def test_nothing_follows_the_last_update() -> None:
    ledger = Ledger()
    ledger.open("a", 1, now=0.0)
    ledger.report("a", [1], now=1.0, finish_reason=FinishReason.stop)
    with pytest.raises(LedgerError, match="finished already"):
        ledger.report("a", [2], now=2.0)
    with pytest.raises(LedgerError, match="finished already"):
        ledger.report("a", [], now=2.0, finish_reason=FinishReason.abort)
    with pytest.raises(LedgerError):
        ledger.schedule("a", num_cached_tokens=0, now=2.0)
    with pytest.raises(LedgerError):
        ledger.preempt("a")
    assert sum(ledger.finished.values()) == 1


def test_an_open_account_is_not_opened_again() -> None:
    ledger = Ledger()
    ledger.open("a", 1, now=0.0)
    with pytest.raises(LedgerError, match="opened twice"):
        ledger.open("a", 1, now=0.0)


def test_a_request_that_ends_early_has_no_times_of_what_it_did_not_reach() -> None:
    ledger = Ledger()
    ledger.open("waiting", 1, now=0.0)
    update = ledger.report("waiting", [], now=3.0, finish_reason=FinishReason.abort)
    assert (update.queued_s, update.prefill_s, update.decode_s) == (3.0, 0.0, 0.0)
    ledger.open("prefilling", 1, now=0.0)
    ledger.schedule("prefilling", num_cached_tokens=0, now=1.0)
    update = ledger.report("prefilling", [], now=3.0, finish_reason=FinishReason.abort)
    assert (update.queued_s, update.prefill_s, update.decode_s) == (1.0, 2.0, 0.0)
    assert ledger.prompt_tokens == 1


def test_an_error_carries_message_field_and_status() -> None:
    ledger = Ledger()
    ledger.open("a", 1, now=0.0)
    error = RequestError("too long", param="prompt", status=400)
    update = ledger.report("a", [], now=0.0, finish_reason=FinishReason.error, error=error)
    assert (update.error, update.error_param, update.error_status) == ("too long", "prompt", 400)
    assert update.finish_reason is FinishReason.error
