"""What a run produced: rounds, a generation and its times; medians and intervals; the results files.

Every time in the project is defined here, once:

    TTFT        first commit - start, prefill inside                                   [s]
    TPOT        (last commit - first commit) / (n - n_first)                           [s]
    throughput  n / (last commit - start)                                              [tokens / s]

A commit is the moment a round's tokens are known on the host; the clock is read after the device is
synchronised. n is the number of ids emitted, n_first how many came with the first commit.
"""

import functools
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
import transformers


def clock(device: torch.device) -> float:
    """Seconds on a monotonic clock, read after `device` has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class Round:
    """One draft-and-verify round. emitted = accepted plus the bonus or corrected token, cut at a stop token.

    proposed: the most tokens that could be accepted, gamma or the depth of a tree. judged counts the proposals that
    verification looked at: those accepted and the first one rejected (of a tree: the levels on the way down). It is
    what alpha is divided by, since nothing is known of the tokens behind a rejection. tokens: the ids emitted.
    nodes: how many tokens were verified, all branches of a tree together (None: proposed). path: of a tree, the
    indices of the accepted nodes from the root down; a chain has none.
    """

    proposed: int
    accepted: int
    emitted: int
    judged: int | None = None
    tokens: list[int] = field(default_factory=list, compare=False, repr=False)
    nodes: int | None = None
    path: tuple[int, ...] = ()

    def __post_init__(self):
        if self.judged is None:
            self.judged = min(self.accepted + 1, self.proposed)
        if self.nodes is None:
            self.nodes = self.proposed


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

    def count(self, rounds: list[Round]) -> None:
        """These rounds and no others."""
        self.proposed = self.accepted = self.judged = 0
        for round in rounds:
            self.add(round)

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


# ------------------------------------------------------------------------------------- medians and intervals


def median(values) -> float | None:
    """The median of the values that are not None; None of none."""
    values = [v for v in values if v is not None]
    return float(np.median(values)) if values else None


def median_interval(values, confidence: float = 0.95) -> tuple[float, float] | None:
    """The distribution-free confidence interval of the median from order statistics (Conover, section 3.2).

    [x_(k), x_(n+1-k)] with the largest k for which P(Binomial(n, 1/2) < k) <= (1 - confidence) / 2. With
    fewer than six values no 95% interval exists: None.
    """
    values = sorted(v for v in values if v is not None)
    n, k, below = len(values), 0, 0.0
    while k < n / 2 and below + math.comb(n, k) / 2**n <= (1 - confidence) / 2:
        below += math.comb(n, k) / 2**n
        k += 1
    return (float(values[k - 1]), float(values[n - k])) if k else None


def summarise(runs: list[dict], reference: list[dict]) -> dict:
    """One method's runs (each a run_record) to the figures of its row; `reference`: the runs of `target`.

    Times are medians over prompts x repeats with their 95% intervals; alpha and tokens per round are pooled
    over all rounds, as are mean_gamma (proposed / rounds), nodes_per_round (nodes / rounds), accepted_depth (accepted /
    rounds that proposed) and the counts by position in the round; calls are means per generation; the speedup is the
    median over the paired ratios of throughput, each to the target's run on the same prompt in the same repeat.
    gamma_log is the first prompt's.
    """
    base = {(r["prompt"], r["repeat"]): r["throughput"] for r in reference}
    paired = [(r, base.get((r["prompt"], r["repeat"]))) for r in runs]
    series = {
        "ttft_s": [r["ttft_s"] for r in runs],
        "tpot_ms": [r["tpot_ms"] for r in runs],
        "throughput": [r["throughput"] for r in runs],
        "speedup": [r["throughput"] / b for r, b in paired if b and r["throughput"]],
    }
    row = {"n_prompts": len({r["prompt"] for r in runs}), "repeats": len({r["repeat"] for r in runs})}
    for name, values in series.items():
        row[name] = median(values)
        row[f"{name}_ci"] = median_interval(values)
    total = {key: sum(r[key] or 0 for r in runs) for key in ("accepted", "judged", "emitted", "rounds")}
    row["alpha"] = total["accepted"] / total["judged"] if total["judged"] else None
    row["tokens_per_round"] = total["emitted"] / total["rounds"] if total["rounds"] else None
    row["proposed_at"], row["accepted_at"] = (by_position(runs, key) for key in ("proposed_at", "accepted_at"))
    gammas = [gamma for r in runs for gamma in r.get("gamma_log") or ()]
    row["mean_gamma"] = float(np.mean(gammas)) if gammas else None
    drafted = [r for r in runs if r.get("nodes") is not None]
    nodes, rounds, accepted, proposing = (sum(r[key] for r in drafted)
                                          for key in ("nodes", "rounds", "accepted", "rounds_proposing"))
    row["nodes_per_round"] = nodes / rounds if rounds else None
    row["accepted_depth"] = accepted / proposing if proposing else None
    row["gamma_log"] = min(runs, key=lambda r: (r["prompt"], r["repeat"])).get("gamma_log")
    for key in ("target_forwards", "draft_forwards", "n_tokens"):
        row[key] = float(np.mean([r[key] for r in runs]))
    row["peak_memory_mb"] = max((r["peak_memory_mb"] for r in runs if r["peak_memory_mb"]), default=None)
    row["loop_share"] = median(r["loop_share"] for r in runs)
    return row


def by_position(runs: list[dict], key: str) -> list[int]:
    """The runs' counts by position in the round, summed; peers' runs have none."""
    return [sum(counts) for counts in zip_longest(*(r.get(key) or () for r in runs), fillvalue=0)]


def run_record(out: Generation, prompt: int, repeat: int, **more) -> dict:
    """One generation as a flat record, the unit that summarise() takes. Keys in the units of the results.

    proposed_at[i], accepted_at[i]: in how many rounds the proposal at position i (from 0; of a tree: one at depth i)
    was judged, and in how many of them accepted. nodes: tokens verified; rounds_proposing: the rounds that proposed
    any; gamma_log: the number proposed, round by round. These three are None where no drafter of ours proposed.
    """
    deepest = max((r.judged for r in out.rounds), default=0)
    return {
        "prompt": prompt,
        "repeat": repeat,
        "n_tokens": len(out.tokens),
        "ttft_s": out.ttft,
        "tpot_ms": None if out.tpot is None else 1000 * out.tpot,
        "throughput": out.throughput,
        "accepted": sum(r.accepted for r in out.rounds),
        "judged": sum(r.judged for r in out.rounds),
        "emitted": sum(r.emitted for r in out.rounds),
        "rounds": len(out.rounds),
        "proposed_at": [sum(r.judged > i for r in out.rounds) for i in range(deepest)],
        "accepted_at": [sum(min(r.accepted, r.judged) > i for r in out.rounds) for i in range(deepest)],
        "nodes": sum(r.nodes for r in out.rounds) if out.levels else None,
        "rounds_proposing": sum(r.proposed > 0 for r in out.rounds) if out.levels else None,
        "gamma_log": [r.proposed for r in out.rounds] if out.levels else None,
        "target_forwards": out.target_forwards,
        "draft_forwards": out.draft_forwards,
        **more,
    }


# --------------------------------------------------------------------------------------------- results files

# Every row of results.jsonl has these; what does not apply is null.
FIELDS = (
    "date commit command pair target draft device dtype engine threads text method lossless gamma temperature "
    "top_k top_p max_new_tokens seed n_prompts repeats ttft_s tpot_ms throughput speedup alpha "
    "tokens_per_round target_forwards draft_forwards peak_memory_mb ppl n_tokens window stride"
).split()


def run_meta(command: str, device: torch.device, dtype: torch.dtype) -> dict:
    """The fields that tell when, from which code, with which command and on which machine a run was made."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": git_commit(),
        "command": command,
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, "
                    f"transformers {transformers.__version__}",
    }


def git_commit() -> str | None:
    """The short hash, with + when tracked files other than the results differ; None outside a git checkout."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True)

    try:
        head = git("rev-parse", "--short", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", ".", ":(exclude)results.*").returncode
    except OSError:
        return None
    return head.stdout.strip() + "+" * (changed == 1) if head.returncode == 0 else None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"model name\s*:\s*(.+)", info)
    vectors = torch.backends.cpu.get_cpu_capability()  # what 8 bits gain hangs on them
    vectors += " with VNNI" if re.search(r"\bavx(512)?_vnni\b", info) else ""
    return f"cpu ({found[1].strip() if found else platform.machine()}, {os.cpu_count()} cores, {vectors})"


@dataclass(frozen=True)
class Column:
    """One column of a table: its title, the key of the row it shows and how (a format spec; `ci` appends the
    95% interval kept under key_ci)."""

    title: str
    key: str
    spec: str = ""
    width: int = 9
    ci: bool = False

    def cell(self, row: dict) -> str:
        value = row.get(self.key)
        text = "-" if value is None else format(value, self.spec)
        if len(text) > self.width and isinstance(value, float):
            text = format(value, ".2e")  # a perplexity beyond all bounds keeps to its column
        interval = row.get(f"{self.key}_ci") if self.ci else None
        if interval:
            text += " [" + ", ".join(format(v, self.spec) for v in interval) + "]"
        return text.ljust(self.width) if isinstance(value, str) else text.rjust(self.width)


class Results:
    """Appends tables to `<folder>/results.txt`, the same rows to `results.jsonl`, and prints them.

    Each line and row is flushed to the disk as it comes, so a run that dies loses nothing it has written.
    """

    def __init__(self, folder: Path, meta: dict):
        """meta: the fields that all rows of this run share."""
        self.text, self.rows = Path(folder) / "results.txt", Path(folder) / "results.jsonl"
        self.meta = meta

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        append(self.text, line)

    def table(self, columns: list[Column]) -> None:
        self.columns = columns
        heads = [c.title.ljust(c.width) if i == 0 else c.title.rjust(c.width) for i, c in enumerate(columns)]
        self.say("\n" + "  ".join(heads))
        self.say("  ".join("-" * c.width for c in columns))

    def header(self, lines: dict) -> None:
        """The head of a run: who measured what, on which machine, with which command. lines: what else to say."""
        meta = self.meta
        draft = f" <- {meta['draft']}" if meta.get("draft") else ""
        draft += f" (proposes {meta['draft_vocab']:,} tokens)" if meta.get("draft_vocab") else ""
        note = f" ({meta['engine_note']})" if meta.get("engine_note") else ""
        self.say(f"\n== {meta['date']}  commit {meta['commit']}")
        shown = {
            "command": meta["command"],
            "pair": f"{meta['pair']}: {meta['target']}{draft}",
            "machine": f"{meta['device']}, {meta['threads']} threads, {meta['dtype']}, engine {meta['engine']}{note}",
            "versions": meta["versions"],
            **lines,
        }
        for key, value in shown.items():
            self.say(f"{key:9} {value}")

    def row(self, **values) -> None:
        self.line(self.record(**values))

    def record(self, **values) -> dict:
        """The row into results.jsonl alone, and back, with all its fields."""
        row = {**dict.fromkeys(FIELDS), **self.meta, **values}
        append(self.rows, json.dumps(finite(row), ensure_ascii=False))
        return row

    def line(self, row: dict) -> None:
        """A line of the table alone."""
        self.say("  ".join(c.cell(row) for c in self.columns).rstrip())


def append(path: Path, line: str) -> None:
    """Append one line and see it on the disk."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def finite(value):
    """The value with every infinity and NaN as None, which JSON has no name for."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------- how a measuring script ends


def fail(script: str, message) -> None:
    """One line that says what is wrong, exit status 2."""
    print(f"{script}: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


def as_script(script: str, stopped: str = "interrupted: what was measured is in results.txt"):
    """For main(argv) -> exit status: it ends in one line and 2 where the input is bad or the memory full, and in 130
    and the line `stopped` when it is interrupted; every row is on the disk by then."""
    def decorate(main):
        @functools.wraps(main)
        def guarded(argv: list[str]) -> int:
            try:
                return main(argv)
            except (ValueError, OSError, torch.OutOfMemoryError) as error:
                fail(script, error)
            except KeyboardInterrupt:
                print(f"\n{stopped}", file=sys.stderr)
                return 130
        return guarded
    return decorate
