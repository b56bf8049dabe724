"""Rounds, generations and times by hand; intervals against the binomial law; the results files."""
import json
import math
import os

import pytest
import torch

import metrics
from metrics import (FIELDS, Column, Generation, Level, Results, Round, clock, finite, median,
                     median_interval, run_record, summarise)
from regrSampling import cut_round


def generation():
    out = Generation(start=10.0, target_forwards=3, draft_forwards=8, levels=[Level("draft")])
    out.commit([1, 2, 3], Round(4, 2, 3), now=12.0)
    out.commit([4], Round(4, 0, 1), now=12.5)
    out.commit([5, 6], Round(1, 1, 2), now=14.0)
    return out


# ---------------------------------------------------------------------------------------- what a run produced


@pytest.mark.parametrize("proposed, accepted, judged", [(0, 0, 0), (4, 0, 1), (4, 3, 4), (4, 4, 4)])
def test_judged_are_the_accepted_and_the_first_rejected(proposed, accepted, judged):
    assert Round(proposed, accepted, accepted + 1).judged == judged


def test_a_generation_by_hand():
    out = generation()
    assert out.tokens == [1, 2, 3, 4, 5, 6] and out.n_first == 3
    assert out.ttft == 2.0
    assert out.tpot == (14.0 - 12.0) / 3
    assert out.throughput == 6 / 4
    assert out.acceptance_rate == 3 / (3 + 1 + 1)
    assert out.tokens_per_round == 2


def test_what_is_not_defined_is_none():
    empty = Generation()
    assert (empty.ttft, empty.tpot, empty.throughput) == (None, None, None)
    assert (empty.acceptance_rate, empty.tokens_per_round) == (None, None)
    one = Generation(start=1.0)
    one.commit([7, 8], Round(1, 1, 2), now=2.0)
    assert (one.ttft, one.tpot, one.throughput) == (1.0, None, 2.0)
    plain = Generation()
    plain.commit([7], Round(0, 0, 1), now=2.0)
    assert plain.acceptance_rate is None and plain.tokens_per_round == 1


def test_a_commit_leaves_the_callers_list_alone():
    out, tokens = Generation(), [1, 2]
    out.commit(tokens, Round(1, 1, 2), now=1.0)
    out.commit([3], Round(0, 0, 1), now=2.0)
    assert tokens == [1, 2] and out.tokens == [1, 2, 3]


def test_levels_add_up():
    level = Level("draft")
    assert level.acceptance_rate is None
    for r in (Round(4, 2, 3), Round(3, 3, 4), Round(0, 0, 1)):
        level.add(r)
    assert (level.proposed, level.accepted, level.judged) == (7, 5, 6) and level.acceptance_rate == 5 / 6
    level.count([Round(2, 1, 2), Round(3, 0, 0, judged=0)])
    assert (level.proposed, level.accepted, level.judged) == (5, 1, 2)


def test_the_ids_of_a_round_are_no_part_of_its_equality():
    assert Round(1, 1, 2, tokens=[3, 4]) == Round(1, 1, 2) and "3" not in repr(Round(1, 1, 2, tokens=[3, 4]))


def test_the_clock_waits_for_a_cuda_device_and_never_goes_back(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    times = [clock(torch.device(d)) for d in ("cpu", "cuda", "cpu")]
    assert times == sorted(times) and waited == [torch.device("cuda")]


# -------------------------------------------------------------------------------------- medians and intervals


def test_median():
    assert median([3, None, 1, 2]) == 2 and median([1, 4]) == 2.5
    assert median([None]) is None and median([]) is None


@pytest.mark.parametrize("n", range(1, 60))
@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_the_interval_is_the_narrowest_symmetric_one_that_covers(n, confidence):
    """P(x_(k) <= median <= x_(n+1-k)) = P(k <= Binomial(n, 1/2) <= n - k), for any continuous law."""

    def covers(k):
        return sum(math.comb(n, i) for i in range(k, n - k + 1)) / 2**n >= confidence

    best = max((k for k in range(1, n // 2 + 1) if covers(k)), default=None)
    values = [float(i) for i in range(1, n + 1)]
    expected = None if best is None else (float(best), float(n + 1 - best))
    assert median_interval(values[::-1] + [None], confidence) == expected


def test_intervals_from_tables():
    values = list(range(1, 101))
    assert median_interval(values[:5]) is None
    assert median_interval(values[:6]) == (1, 6)
    assert median_interval(values[:10]) == (2, 9)
    assert median_interval(values[:20]) == (6, 15)
    assert median_interval(values) == (40, 61)


def record(prompt, repeat, throughput, **more):
    return run_record(generation(), prompt, repeat, peak_memory_mb=None, loop_share=0.1, **more) | {
        "throughput": throughput}


def test_a_record_in_the_units_of_the_results():
    r = run_record(generation(), 3, 1, note="x")
    assert (r["prompt"], r["repeat"], r["n_tokens"], r["note"]) == (3, 1, 6, "x")
    assert (r["ttft_s"], r["throughput"]) == (2.0, 1.5) and r["tpot_ms"] == pytest.approx(2000 / 3)
    assert (r["accepted"], r["judged"], r["emitted"], r["rounds"]) == (3, 5, 6, 3)
    assert (r["target_forwards"], r["draft_forwards"]) == (3, 8)


def test_counts_by_position_in_the_round():
    """Rounds of 4, 4 and 1 proposals: 2, 0 and 1 accepted; a fourth one cut by a stop token behind 3 accepted."""
    out = generation()
    r = run_record(out, 0, 0)
    assert (r["proposed_at"], r["accepted_at"], r["gamma_log"]) == ([3, 1, 1], [2, 1, 0], [4, 4, 1])
    out.commit([1, 2, 3], Round(5, 3, 3, judged=3), now=15.0)
    r = run_record(out, 0, 0)
    assert (r["proposed_at"], r["accepted_at"], r["gamma_log"]) == ([4, 2, 2], [3, 2, 1], [4, 4, 1, 5])
    assert sum(r["proposed_at"]) == r["judged"] and sum(r["accepted_at"]) == r["accepted"]
    plain = Generation()
    plain.commit([7], Round(0, 0, 1), now=2.0)
    r = run_record(plain, 0, 0)
    assert (r["proposed_at"], r["accepted_at"], r["gamma_log"]) == ([], [], None)
    untold = Generation()  # transformers' assisted generation does not tell what it proposed
    untold.commit([7, 8, 9], Round(2, 2, 3, judged=0), now=2.0)
    r = run_record(untold, 0, 0)
    assert (r["proposed_at"], r["accepted_at"], r["gamma_log"]) == ([], [], None)


def test_counts_by_position_are_pooled_and_the_log_is_the_first_prompts():
    short = Generation(levels=[Level("draft")])
    short.commit([1, 2], Round(2, 1, 2), now=1.0)
    short.commit([1], Round(0, 0, 1), now=2.0)
    more = dict(peak_memory_mb=None, loop_share=0.1)
    runs = [run_record(generation(), 1, 0, **more), run_record(short, 0, 1, **more), run_record(short, 0, 0, **more)]
    row = summarise(runs, [])
    assert (row["proposed_at"], row["accepted_at"]) == ([5, 3, 1], [4, 1, 0])
    assert row["gamma_log"] == [2, 0] and row["mean_gamma"] == (4 + 4 + 1 + 2 + 0 + 2 + 0) / 7
    old = [{k: v for k, v in r.items() if k not in ("proposed_at", "accepted_at", "gamma_log")} for r in runs]
    row = summarise(old, [])
    assert (row["proposed_at"], row["accepted_at"], row["gamma_log"], row["mean_gamma"]) == ([], [], None, None)


def test_the_speedup_is_paired_prompt_by_prompt_and_repeat_by_repeat():
    target = [record(p, r, 10.0 * (p + 1) + r) for p in range(3) for r in range(2)]
    runs = [record(p, r, 2 * (10.0 * (p + 1) + r)) for p in range(3) for r in range(2)][::-1]
    row = summarise(runs, target)
    assert row["speedup"] == 2.0 and row["speedup_ci"] == (2.0, 2.0)
    assert (row["n_prompts"], row["repeats"]) == (3, 2)
    assert row["throughput"] == 2 * (20 + 21) / 2 and row["throughput_ci"] == (20.0, 62.0)
    assert row["alpha"] == 3 / 5 and row["tokens_per_round"] == 2
    assert (row["target_forwards"], row["draft_forwards"], row["n_tokens"]) == (3, 8, 6)
    assert row["peak_memory_mb"] is None


def test_undefined_times_are_left_out_of_the_medians():
    runs = [record(p, 0, 1.0) | {"tpot_ms": t} for p, t in enumerate([None, 4.0, None, 6.0, 5.0])]
    row = summarise(runs, [])
    assert row["tpot_ms"] == 5.0 and row["speedup"] is None and row["speedup_ci"] is None
    none = summarise([r | {"tpot_ms": None, "rounds": 0, "judged": 0} for r in runs], [])
    assert (none["tpot_ms"], none["alpha"], none["tokens_per_round"]) == (None, None, None)


# ---------------------------------------------------------------------------------------------- results files


COLUMNS = [Column("method", "method", width=8), Column("TTFT s", "ttft_s", ".3f"),
           Column("TPOT ms", "tpot_ms", ".1f", 20, ci=True)]


def test_a_table_is_aligned_and_shows_what_is_undefined_as_a_dash(tmp_path, capsys):
    results = Results(tmp_path, {"pair": "tiny"})
    results.table(COLUMNS)
    results.row(method="target", ttft_s=0.5, tpot_ms=12.345, tpot_ms_ci=(11.0, 13.06))
    results.row(method="spec", ttft_s=None, tpot_ms=None)
    text = (tmp_path / "results.txt").read_text()
    assert text == capsys.readouterr().out
    assert text.splitlines()[1:] == [
        "method       TTFT s               TPOT ms",
        "--------  ---------  --------------------",
        "target        0.500     12.3 [11.0, 13.1]",
        "spec              -                     -",
    ]


def test_a_row_has_every_field_and_null_for_what_does_not_apply(tmp_path, capsys):
    results = Results(tmp_path, {"pair": "tiny", "seed": 0})
    results.table(COLUMNS)
    results.row(method="target", ppl=float("inf"), ttft_s=float("nan"), ppl_ci=(1.0, float("inf")))
    row = json.loads((tmp_path / "results.jsonl").read_text(), parse_constant=pytest.fail)
    assert set(FIELDS) <= set(row)
    assert (row["pair"], row["seed"], row["method"]) == ("tiny", 0, "target")
    assert row["ppl"] is None and row["ttft_s"] is None
    assert row["ppl_ci"] == [1.0, None] and row["gamma"] is None


def test_the_fields_the_design_promises():
    promised = """date commit command pair target draft device dtype engine threads text method lossless gamma
        temperature top_k top_p max_new_tokens seed n_prompts repeats ttft_s tpot_ms throughput speedup alpha
        tokens_per_round target_forwards draft_forwards peak_memory_mb ppl n_tokens window stride"""
    assert set(promised.split()) <= set(FIELDS)


def test_each_row_is_on_the_disk_before_the_next_and_old_ones_stay(tmp_path, monkeypatch, capsys):
    synced = []
    monkeypatch.setattr(metrics.os, "fsync", synced.append)
    for turn in range(2):
        results = Results(tmp_path, {"pair": "tiny"})
        results.table(COLUMNS)
        for n in range(3):
            before = len(synced)
            results.row(method=f"m{turn}{n}")
            lines = (tmp_path / "results.jsonl").read_text().splitlines()
            assert [json.loads(line)["method"] for line in lines][-1] == f"m{turn}{n}"
            assert len(lines) == 3 * turn + n + 1 and len(synced) == before + 2


def test_finite_keeps_everything_else():
    value = {"a": [1, 2.5, "x", None, True], "b": {"c": float("-inf")}}
    assert finite(value) == {"a": [1, 2.5, "x", None, True], "b": {"c": None}}


def test_rounds_of_trees():
    """A tree of 6 nodes, 2 deep, one of 10, 3 deep, and a round without a proposal."""
    assert (Round(4, 2, 3).nodes, Round(4, 2, 3).path) == (4, ())
    out = Generation(levels=[Level("draft")])
    for i, r in enumerate((Round(2, 2, 3, nodes=6, path=(1, 4)), Round(3, 0, 1, nodes=10), Round(0, 0, 1))):
        out.commit([1] * r.emitted, r, now=float(i))
    r = run_record(out, 0, 0, peak_memory_mb=None, loop_share=None)
    assert (r["nodes"], r["rounds_proposing"], r["gamma_log"]) == (16, 2, [2, 3, 0])
    assert (r["proposed_at"], r["accepted_at"]) == ([2, 1], [1, 1])
    plain = Generation()
    plain.commit([7], Round(0, 0, 1), now=2.0)
    none = run_record(plain, 1, 0, peak_memory_mb=None, loop_share=None)
    assert (none["nodes"], none["rounds_proposing"]) == (None, None)
    row = summarise([r, r | {"repeat": 1}], [])
    assert (row["nodes_per_round"], row["accepted_depth"]) == (32 / 6, 4 / 4)
    row = summarise([none], [])
    assert (row["nodes_per_round"], row["accepted_depth"]) == (None, None)


def test_a_round_cut_by_a_stop_token_keeps_its_nodes_and_shortens_its_path():
    r = cut_round(Round(3, 3, 4, tokens=[5, 6, 7, 8], nodes=10, path=(0, 2, 7)), 2)
    assert r == Round(3, 2, 2, judged=2, nodes=10, path=(0, 2)) and r.tokens == [5, 6]


def test_a_cpu_is_named_with_what_it_has(monkeypatch):
    said = "model name\t: Chip 9\nflags\t\t: sse2 avx2 {}\n"
    for flags, vectors in (("fma", "AVX2"), ("avx512_vnni fma", "AVX2 with VNNI"), ("avx_vnni", "AVX2 with VNNI")):
        monkeypatch.setattr(metrics.Path, "read_text", lambda self, flags=flags: said.format(flags))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        assert metrics.device_name(torch.device("cpu")) == f"cpu (Chip 9, {os.cpu_count()} cores, {vectors})"
