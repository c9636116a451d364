"""The account of every request: its times and counts, and the fact that it finishes exactly once.

The ledger alone makes `RequestUpdate`s, and it has no way to make one for a request that has ended. Times are
the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.errors import RequestError
from pegainfer.scheduler.plan import FinishReason, RequestUpdate, TokenLogprobs

__all__ = ["Ledger", "LedgerError"]


class LedgerError(RuntimeError):
    """The scheduler contradicted itself about a request; a bug."""


@dataclass(slots=True)
class _Account:
    queued_at: float
    num_prompt_tokens: int
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = float("-inf")
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class Ledger:
    """Open accounts by request id, and totals over all requests."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self.prompt_tokens = 0
        """Prompt tokens of all requests that were ever scheduled."""
        self.generation_tokens = 0
        self.num_preemptions = 0
        self.finished: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)

    def __len__(self) -> int:
        """Requests that have not finished."""
        return len(self._accounts)

    def open(self, request_id: str, num_prompt_tokens: int, *, now: float) -> None:
        """A request arrived."""
        if request_id in self._accounts:
            raise LedgerError(f"request {request_id} was opened twice")
        self._accounts[request_id] = _Account(now, num_prompt_tokens)

    def schedule(self, request_id: str, *, num_cached_tokens: int, now: float) -> None:
        """A request enters the running ones; only the first time counts."""
        account = self._account(request_id)
        if account.scheduled_at is None:
            account.scheduled_at = now
            account.num_cached_tokens = num_cached_tokens
            self.prompt_tokens += account.num_prompt_tokens

    def preempt(self, request_id: str) -> None:
        """A request lost its place among the running ones."""
        self._account(request_id).num_preemptions += 1
        self.num_preemptions += 1

    def report(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        now: float,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: RequestError | None = None,
    ) -> RequestUpdate:
        """What a step yielded for a request, or what ended it: a `finish_reason` closes the account.

        Raises `LedgerError` when the account is closed already.
        """
        account = self._account(request_id)
        is_first = False
        if token_ids:
            self.generation_tokens += len(token_ids)
            account.last_token_at = now
            if account.first_token_at is None:
                account.first_token_at = now
                is_first = True
        if finish_reason is None and not is_first:
            return RequestUpdate(request_id, token_ids, logprobs, prompt_logprobs)
        if finish_reason is not None:
            del self._accounts[request_id]
            self.finished[finish_reason] += 1
        scheduled_at = now if account.scheduled_at is None else account.scheduled_at
        first_token_at = now if account.first_token_at is None else account.first_token_at
        return RequestUpdate(
            request_id,
            token_ids,
            logprobs,
            prompt_logprobs,
            finish_reason,
            stop_reason,
            error=error.message if error else None,
            error_param=error.param if error else None,
            error_status=error.status if error else 500,
            num_cached_tokens=account.num_cached_tokens,
            num_preemptions=account.num_preemptions,
            queued_s=scheduled_at - account.queued_at,
            prefill_s=first_token_at - scheduled_at,
            decode_s=max(account.last_token_at - first_token_at, 0.0),
        )

    def _account(self, request_id: str) -> _Account:
        try:
            return self._accounts[request_id]
        except KeyError:
            raise LedgerError(f"request {request_id} is unknown or has finished already") from None
