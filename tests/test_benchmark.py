"""The benchmark driver, end to end on a tiny pair, and the figures it reports."""

import importlib.util
import json
import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

import metrics
from conftest import ROOT, tiny_model
from costModel import measure_costs, step_times
from metrics import FIELDS, Column, Generation, Results, Round, median_interval, run_record, summarise

TEXT = "\n\n".join(f"Line {i}: the cat sat on the mat and the dog ran to the hill, {i % 7} times." for i in range(60))


@pytest.fixture(scope="module")
def bench():
    """test.py as a module; by path, since the standard library has a package of that name."""
    spec = importlib.util.spec_from_file_location("bench", ROOT / "test.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and two drafts of three families with one byte-level tokenizer, and a file of prompts."""
    root = tmp_path_factory.mktemp("pair")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<end>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>")
    for name, family, seed in (("target", "llama", 0), ("mid", "gpt_neox", 1), ("small", "llama", 2)):
        model = tiny_model(family, seed=seed, sharpness=20, vocab=300, positions=256)
        model.generation_config.eos_token_id = 0
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "prompts.txt").write_text("The cat sat\n\nLine 5: the dog ran\n\nthe hill", encoding="utf-8")
    return root


@pytest.fixture
def run(bench, folders, tmp_path, monkeypatch):
    """run(*flags) -> (exit status, rows, text) of main() on the tiny pair, with results in a fresh folder."""
    monkeypatch.setattr(bench, "text_of", lambda name: TEXT)
    monkeypatch.setattr(bench, "available_texts", lambda: ["wikitext"])

    def main(*flags):
        code = bench.main([*map(str, (
            "--target", folders / "target", "--draft", folders / "small", "--draft", folders / "mid", "--max-len", 12,
            "--prompts", folders / "prompts.txt", "--out", tmp_path, "--device", "cpu", *flags))])
        rows = tmp_path / "results.jsonl"
        lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
        text = tmp_path / "results.txt"
        return code, [json.loads(line) for line in lines], text.read_text("utf-8") if text.exists() else ""

    return main


def test_every_method_has_its_row_and_the_same_greedy_ids(run, bench, tmp_path):
    code, rows, text = run("--speed", 1, "--n-prompts", 2, "--repeats", 2)
    assert code == 0 and "all 24 generations of lossless methods equal the target's" in text  # 6 x 2 x 2
    assert [row["method"] for row in rows] == list(bench.TABLE)
    for row in rows:
        assert set(FIELDS) <= set(row)
        assert row["ppl"] is None and row["n_prompts"] == 2 and row["repeats"] == 2 and row["seed"] == 0
        assert row["lossless"] == (row["method"] not in ("small", "draft-score"))
        assert row["ttft_s"] > 0 and row["throughput"] > 0 and row["peak_memory_mb"] > 1
        assert row["command"].startswith("python test.py --target") and row["dtype"] == "float32"
    by_name = {row["method"]: row for row in rows}
    assert by_name["target"]["speedup"] == 1 and by_name["target"]["alpha"] is None
    assert by_name["target"]["target_forwards"] == by_name["hf"]["target_forwards"] == 12
    assert by_name["small"]["target_forwards"] == 0 and by_name["draft-score"]["target_forwards"] == 1
    assert 0 <= by_name["spec"]["alpha"] <= 1 and by_name["multi"]["gamma"] == [4, 4]
    assert by_name["draft-score"]["mean_log_likelihood"] < by_name["target"]["mean_log_likelihood"] < 0
    assert not (tmp_path / "results.partial.jsonl").exists()


def test_the_table_lines_up(run):
    _, _, text = run("--speed", 1, "--methods", "target,spec", "--n-prompts", 1)
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line) == {"-", " "})
    head, *rows = lines[rule - 1], *lines[rule + 1 : rule + 3]
    ends = [i for i, c in enumerate(lines[rule] + " ") if c == " " and i and lines[rule][i - 1] == "-"][1:]
    for end in ends:  # all columns but the first are set flush right
        assert head[end - 1] != " " and all(row[end - 1] != " " for row in rows)
    assert "1 x prompts.txt of 6 tokens" in text


def test_sampling_is_reproducible_whatever_the_order(run):
    flags = ("--speed", 1, "--methods", "target,spec,dynamic,multi,lookup,hf", "--temperature", 1, "--seed", 5, "--n-prompts", 1)
    _, first, _ = run(*flags)
    _, both, _ = run(*flags)
    for a, b in zip(first, both[len(first):]):
        assert (a["method"], a["alpha"], a["mean_log_likelihood"]) == (b["method"], b["alpha"], b["mean_log_likelihood"])


def test_cost_aware_controller_runs_from_measured_costs(run):
    code, rows, text = run("--speed", 1, "--methods", "target,dynamic", "--controller", "cost")
    assert code == 0 and rows[1]["gamma"] == "cost"


def test_a_method_that_is_not_lossless_fails_the_run(run, bench, monkeypatch):
    wrong = bench.Method(bench.run_small, True, "draft", "claims to be lossless and is not")
    monkeypatch.setitem(bench.TABLE, "spec", wrong)
    code, rows, text = run("--speed", 1, "--methods", "target,spec")
    assert code == 1 and len(rows) == 2
    assert "DIFFERENT: spec, prompt 0, new token" in text and "two best logits there are" in text


@pytest.mark.parametrize("at", [3, 5])
def test_ctrl_c_keeps_what_was_measured(run, bench, monkeypatch, tmp_path, at):
    measured, calls = bench.measured, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return measured(*args)

    monkeypatch.setattr(bench, "measured", interrupted)
    code, rows, _ = run("--speed", 1, "--methods", "target,spec")
    assert code == 130 and sum(row["n_prompts"] for row in rows) == at - 1
    assert not (tmp_path / "results.partial.jsonl").exists()


def test_a_killed_run_is_recovered_by_the_next(run, bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "write_speed_rows", lambda *_: None)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # as if the process had died before
    run("--speed", 1, "--methods", "target,spec")
    monkeypatch.undo()
    journal = tmp_path / "results.partial.jsonl"
    journal.write_text(journal.read_text()[:-40])  # the last line is cut off
    bench.recover(journal, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["method"]: row["n_prompts"] for row in rows} == {"target": 3, "spec": 2} or \
           {row["method"]: row["n_prompts"] for row in rows} == {"target": 2, "spec": 3}
    assert all(row["ttft_s"] > 0 and row["pair"] == "target+small+mid" for row in rows)
    assert "recovered" in (tmp_path / "results.txt").read_text() and not journal.exists()


def test_generate_ends_at_the_context_and_its_own_defaults_are_set_aside(run, folders, tmp_path):
    """A repetition penalty in the model's own generation_config would bend the law of hf and hf-assisted."""
    config = json.loads((folders / "target" / "generation_config.json").read_text())
    penalised = tmp_path / "penalised"
    shutil.copytree(folders / "target", penalised)
    (penalised / "generation_config.json").write_text(json.dumps({**config, "repetition_penalty": 5.0}))
    (tmp_path / "long.txt").write_text(TEXT.replace("\n\n", " "))
    for temperature, methods in ((0, "target,spec,hf,hf-assisted"), (1, "target,hf")):
        code, rows, _ = run("--speed", 1, "--target", penalised, "--methods", methods, "--prompts",
                            tmp_path / "long.txt", "--prompt-tokens", 250, "--temperature", temperature, "--n-prompts", 1)
        assert code == 0 and rows[-1]["n_tokens"] == rows[-2]["n_tokens"] == 6  # the context has 256 positions


def test_logits_of_two_widths_leave_out_only_assisted_generation(run, bench, folders, tmp_path, capsys):
    """As Pythia-70m with 12b. transformers refuses such a draft unless tokenizers are re-encoded in between."""
    wide = tmp_path / "wide"
    shutil.copytree(folders / "small", wide)
    tiny_model("llama", seed=2, sharpness=20, vocab=320, positions=256).save_pretrained(wide)
    flags = ["--target", folders / "target", "--draft", wide, "--speed", 1, "--prompts", folders / "prompts.txt",
             "--n-prompts", 1, "--max-len", 6, "--device", "cpu", "--out", tmp_path]
    assert bench.main([*map(str, flags)]) == 0
    rows = [json.loads(line)["method"] for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert "spec" in rows and "hf" in rows and "hf-assisted" not in rows
    assert "left out: hf-assisted" in capsys.readouterr().out


@pytest.mark.parametrize("controller", ["aimd", "heuristic", "confidence", "fixed"])
def test_every_controller_starts_from_a_large_gamma(run, controller):
    code, rows, _ = run("--speed", 1, "--methods", "target,dynamic", "--controller", controller, "--gamma", 40)
    assert code == 0 and rows[1]["gamma"] == controller


@pytest.mark.parametrize("flags, parts", [
    ([], (1, 1)), (["--speed", "1"], (1, 0)), (["--ppl", "1"], (0, 1)), (["--speed", "1", "--ppl", "1"], (1, 1)),
    (["--speed", "0"], (0, 1)), (["--ppl", "0"], (1, 0)), (["--prompts", "gemma-text"], (1, 0))])
def test_which_parts_run(bench, flags, parts):
    args = bench.parse(flags)
    assert (args.speed, args.ppl) == parts


def test_methods_are_taken_once_and_spaces_do_not_matter(bench):
    assert bench.parse(["--methods", "target, spec,target"]).methods == ["target", "spec"]


def test_a_command_can_be_pasted_back(bench, run, folders, tmp_path):
    file = tmp_path / "my prompts.txt"
    file.write_text("The cat")
    _, rows, _ = run("--speed", 1, "--methods", "target", "--prompts", file)
    assert str(file) in shlex.split(rows[0]["command"])


def test_a_target_without_drafts_says_what_its_methods_need(bench, folders, tmp_path, capsys):
    alone = ["--target", str(folders / "target"), "--prompts", str(folders / "prompts.txt"), "--out", str(tmp_path),
             "--speed", "1", "--device", "cpu", "--max-len", "4"]
    assert bench.main(alone) == 0
    with pytest.raises(SystemExit) as stop:
        bench.main([*alone, "--methods", "spec,multi"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "--draft" in error and "--methods" in error


def test_perplexity_part(run):
    code, rows, text = run("--ppl", 1, "--prompts", "wikitext", "--ppl-tokens", 200, "--window", 64, "--stride", 32,
                           "--tv-positions", 2, "--tv-draws", 400)
    # --prompts is repeatable: the file is no running text and is left out
    assert code == 0 and [r["method"] for r in rows] == ["target", "draft small", "draft mid", "spec", "verify, drawn"]
    assert all((r["temperature"], r["top_p"]) == (1, 1) for r in rows)  # what was scored, not the decoders' flags
    target, _, _, spec, drawn = rows
    assert target["n_tokens"] == spec["n_tokens"] == 199 and (target["window"], target["stride"]) == (64, 32)
    assert math.isclose(target["ppl"], spec["ppl"], rel_tol=1e-5) and spec["max_deviation"] < 1e-5
    assert drawn["tv"] < 3 * drawn["tv_expected"] and drawn["p_value"] > 1e-4
    assert "max |emitted - p|" in text


def test_show_prints_the_text_and_its_origin(run, bench, capsys):
    code, rows, _ = run("--show", "--methods", "spec,lookup", "--max-len", 20)
    shown = capsys.readouterr().out
    assert code == 0 and not rows
    assert "[spec, " in shown and "[lookup, " in shown and "accepted, {+bonus}, {!corrected}" in shown
    assert "rounds for 20 tokens]" in shown


@pytest.mark.parametrize("flags, words", [
    (["--methods", "spec,warp"], "unknown method 'warp': --methods takes"),
    (["--gamma", "0"], "--gamma must be at least 1"),
    (["--maxLen", "0"], "--max-len must be at least 1"),
    (["--top-p", "1.5"], "top_p must lie in [0, 1]"),
    (["--temperature", "-1"], "temperature must be 0"),
    (["--stride", "70", "--window", "64"], "--stride must not exceed --window"),
    (["--gammas", "4"], "--gammas needs one number for each of the 2 drafts"),
    (["--gammas", "4,x"], "--gammas"),
    (["--prompts", "nowhere.txt"], "nowhere.txt"),
    (["--device", "cuda:9"], "cuda:9"),
    (["--dtype", "float8"], "--dtype"),
    (["--controller", "fate"], "--controller"),
    (["--gama", "4"], "--gama"),
    (["--draft", "no/such-model"], "no/such-model"),
    (["--out", "no/such/folder"], "--out no/such/folder"),
    (["--chat"], "--chat"),
    (["--speed", "0", "--ppl", "0"], "nothing to run"),
    (["--ppl", "1", "--prompts", "gemma-text"], "perplexity needs a running text"),
    (["--seed", str(2**70)], "seed"),
    (["--prompts", str(ROOT / "README.md"), "--prompt-tokens", "257"], "--prompt-tokens"),
])
def test_bad_flags_end_in_one_line(run, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        run("--speed", 1, *flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.startswith("test.py: ") and error.count("\n") == 1


def test_unknown_pair_from_the_shell():
    done = subprocess.run([sys.executable, "test.py", "--pair", "none"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--pair" in done.stderr


def test_prompts_and_repeats_draw_with_seeds_of_their_own(run, bench, monkeypatch):
    seeds = []
    own = bench.TABLE["target"]
    spied = bench.Method(lambda s, ids, params, on_tokens=None: seeds.append(params.seed) or own.run(s, ids, params), True,
                         "", "")
    monkeypatch.setitem(bench.TABLE, "target", spied)
    run("--speed", 1, "--methods", "target", "--temperature", 1, "--seed", 7, "--n-prompts", 2, "--repeats", 2)
    assert sorted(seeds[1:]) == [7, 8, 1007, 1008]  # the first is the warm-up's


def test_the_readme_names_every_flag(bench, monkeypatch):
    seen = []
    monkeypatch.setattr(bench.argparse.ArgumentParser, "parse_args", lambda self, _: seen.append(self) or bench.sys.exit())
    with pytest.raises(SystemExit):
        bench.parse([])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for action in seen[0]._actions[1:]:
        row = f"| {', '.join(f'`{flag}`' for flag in action.option_strings)} | "
        assert row in readme and readme.split(row)[1].split("\n")[0].endswith(f"| {action.help} |"), row


def test_rows_are_valid_json_without_infinities(tmp_path):
    results = Results(tmp_path, {"pair": "x"})
    results.table([Column("method", "method", "", 8), Column("PPL", "ppl", ".2f", 8)])
    results.row(method="a", ppl=math.inf)
    results.row(method="b", ppl=123456789.0)
    assert [json.loads(line)["ppl"] for line in (tmp_path / "results.jsonl").read_text().splitlines()] == [None, 123456789]
    assert "     inf" in (tmp_path / "results.txt").read_text() and "1.23e+08" in (tmp_path / "results.txt").read_text()


def test_median_interval_covers_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(1000):
        low, high = median_interval(torch.rand(15, generator=generator).tolist())
        hits += low <= 0.5 <= high
    assert 0.95 - 0.02 <= hits / 1000 <= 0.985  # order statistics can only cover a little more than asked
    assert median_interval([1.0, 2.0, 3.0]) is None and median_interval([None] * 9) is None
    assert median_interval([3, 1, 2, 6, 5, 4]) == (1, 6)


def generation(start, commits):
    out = Generation(start=start)
    for tokens, round, now in commits:
        out.commit(tokens, round, now)
    return out


def test_summary_pairs_the_speedup_and_pools_alpha():
    def record(throughput_time, prompt, accepted, proposed):
        out = generation(0.0, [([1], Round(0, 0, 1), throughput_time / 2),
                               ([2] * (accepted + 1), Round(proposed, accepted, accepted + 1), throughput_time)])
        return run_record(out, prompt, 0, peak_memory_mb=10.0, loop_share=0.1)

    target = [record(2.0, 0, 0, 0), record(8.0, 1, 0, 0)]
    fast = [record(1.0, 0, 4, 4), record(2.0, 1, 1, 4)]
    row = summarise(fast, target)
    # throughputs 6/1 against 2/2, and 3/2 against 2/8
    assert row["speedup"] == pytest.approx(6.0) and row["n_prompts"] == 2
    assert row["alpha"] == 5 / 6 and row["tokens_per_round"] == 9 / 4
    assert row["tpot_ms"] == pytest.approx(1000 * (0.5 / 5 + 1.0 / 2) / 2) and row["ttft_s"] == 0.75


def test_costs_are_positive_and_as_long_as_asked():
    target, draft = tiny_model("llama"), tiny_model("gpt_neox", seed=1)
    costs = measure_costs(target, draft, max_gamma=3)
    assert len(costs.v) == 4 and costs.v[0] == 1 and min(costs.v) > 0 and costs.c > 0
    assert len(step_times(target, [1, 5], repeats=2)) == 2


def test_clock_waits_for_the_device(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    metrics.clock(torch.device("cpu"))
    assert not waited
    metrics.clock(torch.device("cuda:0"))
    assert waited == [torch.device("cuda:0")]
