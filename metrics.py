"""What a run produced: rounds, a generation and its times; medians and intervals; the results files.

Every time in the project is defined here, once:

    TTFT        first commit - start, prefill inside                                   [s]
    TPOT        (last commit - first commit) / (n - n_first)                           [s]
    throughput  n / (last commit - start)                                              [tokens / s]

A commit is the moment a round's tokens are known on the host; the clock is read after the device is
synchronised. n is the number of ids emitted, n_first how many came with the first commit.
"""

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch


def clock(device: torch.device) -> float:
    """Seconds on a monotonic clock, read after `device` has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class Round:
    """One draft-and-verify round. emitted = accepted plus the bonus or corrected token, cut at a stop token.

    judged counts the proposals that verification looked at: those accepted and the first one rejected. It is
    what alpha is divided by, since nothing is known of the tokens behind a rejection.
    """

    proposed: int
    accepted: int
    emitted: int
    judged: int | None = None

    def __post_init__(self):
        if self.judged is None:
            self.judged = min(self.accepted + 1, self.proposed)


@dataclass
class Level:
    """The counts of one model (or lookup) below the target, kept apart: a stage of a cascade or the draft."""

    name: str
    proposed: int = 0
    accepted: int = 0
    judged: int = 0
    forwards: int = 0

    def add(self, round: Round) -> None:
        self.proposed += round.proposed
        self.accepted += round.accepted
        self.judged += round.judged

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.judged if self.judged else None


@dataclass
class Generation:
    """What one decoder call produced. Times are in seconds, None where undefined (shown as "-").

    finish_reason: "length" (max_new_tokens reached), "stop" (a stop token, which is the last of tokens) or
    "context" (the target's context is full).
    """

    tokens: list[int] = field(default_factory=list)  # new ids only
    rounds: list[Round] = field(default_factory=list)
    target_forwards: int = 0
    draft_forwards: int = 0  # of every model below the target together; `levels` has them apart
    levels: list[Level] = field(default_factory=list)  # smallest first
    finish_reason: str | None = None
    start: float = 0.0
    first_commit: float | None = None
    last_commit: float | None = None
    n_first: int = 0

    def commit(self, tokens: list[int], round: Round, now: float) -> None:
        """Append one round's tokens, known at `now` [s]."""
        self.tokens += tokens
        self.rounds.append(round)
        self.last_commit = now
        if self.first_commit is None:
            self.first_commit, self.n_first = now, len(tokens)

    @property
    def ttft(self) -> float | None:
        return None if self.first_commit is None else self.first_commit - self.start

    @property
    def tpot(self) -> float | None:
        later = len(self.tokens) - self.n_first
        return (self.last_commit - self.first_commit) / later if later > 0 else None

    @property
    def throughput(self) -> float | None:
        return len(self.tokens) / (self.last_commit - self.start) if self.tokens else None

    @property
    def acceptance_rate(self) -> float | None:
        """alpha: accepted / judged, over all rounds."""
        judged = sum(r.judged for r in self.rounds)
        return sum(r.accepted for r in self.rounds) / judged if judged else None

    @property
    def tokens_per_round(self) -> float | None:
        """tau: emitted / rounds, the bonus token included."""
        return len(self.tokens) / len(self.rounds) if self.rounds else None
