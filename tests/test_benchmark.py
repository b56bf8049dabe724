"""The benchmark driver, end to end on a tiny pair, and the figures it reports."""

import importlib.machinery
import importlib.util
import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

import downloadData
import methods
import metrics
import peers
from cachedModel import CachedModel
from conftest import ROOT, tiny_model
from costModel import Costs, measure_costs, step_times
from heads import save_head
from loadModel import FREQUENT_FILE, load_model
from metrics import FIELDS, Column, Generation, Results, Round, median_interval, run_record, summarise
from specSampling import Drafter, NGramDrafter
from treeSampling import Tree
from utils import SamplingParams

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


def save_heads(folder, target):
    """Untrained heads of all kinds for the model in the folder `target`."""
    model = load_model(target, torch.device("cpu"), torch.float32)
    accuracy = [[0.5, 0.25, 0.125], [0.375, 0.125, 0.0625]]
    shape = {"medusa": {"heads": 2, "accuracy": accuracy}, "eagle": {"inner": 32, "heads": 2},
             "mtp": {"inner": 32, "heads": 2}}
    for kind, own in shape.items():
        head = methods.HEADS[kind](16, model.config.vocab_size, **own)
        head.bind(model).start(tied=False)
        save_head(head, folder / kind, model)


@pytest.fixture(scope="module")
def heads(folders):
    """The flag that names the target's heads."""
    save_heads(folders / "heads", folders / "target")
    return ["--heads", *(folders / "heads" / kind for kind in methods.HEADS)]


@pytest.fixture
def run(bench, folders, tmp_path, monkeypatch):
    """run(*flags) -> (exit status, rows, text) of main() on the tiny pair, with results in a fresh folder."""
    for module in (bench, downloadData):  # no test here waits for what is in datasets/
        monkeypatch.setattr(module, "text_of", lambda name: TEXT)
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


def test_every_method_has_its_row_and_the_same_greedy_ids(run, bench, heads, tmp_path):
    code, rows, text = run("--speed", 1, "--n-prompts", 2, "--repeats", 2, *heads)
    assert code == 0 and "all 52 generations of lossless methods equal the target's" in text  # 13 x 2 x 2
    assert [row["method"] for row in rows] == list(bench.METHODS)
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
    assert by_name["dynamic"]["controller"] == "aimd" and by_name["spec"]["controller"] is None
    for name in ("spec", "dynamic", "multi", "lookup", "combined", "tree", "medusa", "eagle", "mtp", "lookup+eagle"):
        assert by_name[name]["predicted"] > 0 and by_name[name]["decode_speedup"] > 0
    assert by_name["target"]["decode_speedup"] == 1 and by_name["hf"]["predicted"] is None
    assert not list(tmp_path.glob("results.partial*"))


def tables(text):
    """The aligned tables of results.txt: {first title: [the cells of each line, titles first]}."""
    lines = text.splitlines()
    found = {}
    for i, rule in enumerate(lines):
        if rule and set(rule) == {"-", " "}:
            bounds = [0, *(j + 2 for j in range(len(rule)) if rule[j : j + 2] == "  "), len(rule) + 2]
            rows = [lines[i - 1], *takewhile(str.strip, lines[i + 1 :])]  # and the notes behind them
            rows = [[row[a : b - 2].strip() for a, b in zip(bounds, bounds[1:])] for row in rows]
            found[rows[0][0]] = rows
    return found


def test_methods_by_category_are_a_view_of_the_rows(run, folders):
    """A prompt set is a category; the last column is over all prompts, not over the sets' figures."""
    file = folders / "questions.jsonl"
    asked = [{"prompt": f"Line {i}: the cat", "category": category} for i in range(3) for category in ("qa", "rag")]
    file.write_text("".join(json.dumps(question) + "\n" for question in asked))
    code, rows, text = run("--speed", 1, "--methods", "target,lookup:2", "--n-prompts", 3,
                           *(word for name in ("qa", "rag") for word in ("--prompts", f"{file}:{name}")))
    each, everything = [row for row in rows if row["text"] != "all"], [row for row in rows if row["text"] == "all"]
    assert code == 0 and [row["n_prompts"] for row in everything] == [9, 9] and len(each) == 6
    found = tables(text)
    sets = ["prompts", "qa", "rag"]
    assert found["speedup"][0] == ["speedup", *sets, "all"]
    assert found["tokens per round"][0] == ["tokens per round", *sets, "all", "mean nodes"]
    assert "\nequal budget: 2 nodes\n\nspeedup " in text  # target drafts nothing
    for key, title in (("speedup", "speedup"), ("tokens_per_round", "tokens per round")):
        for i, label in enumerate(("target", "lookup:2")):
            figures = [row[key] for row in each if row["label"] == label] + [everything[i][key]]
            assert found[title][i + 1][:5] == [label, *(f"{figure:.2f}" for figure in figures)]
    lookup = [row for row in each if row["label"] == "lookup:2"]
    tokens, rounds = (sum(count(row) for row in lookup) for count in (
        lambda row: row["n_tokens"] * row["n_prompts"],
        lambda row: row["n_tokens"] * row["n_prompts"] / row["tokens_per_round"]))
    assert everything[1]["tokens_per_round"] == pytest.approx(tokens / rounds)


def test_lossy_methods_and_unequal_budgets_in_the_tables_by_category(run, bench, folders, heads):
    (folders / "other.txt").write_text("Line 9: the mat")
    labels = ["target", "medusa:3", "medusa-typical:3", "spec:4"]
    code, rows, text = run("--speed", 1, "--methods", ",".join(labels), "--n-prompts", 1, "--prompts",
                           folders / "other.txt", *heads)
    for title in ("speedup", "tokens per round"):
        lines = tables(text)[title][1:5]
        assert [line[0] for line in lines] == ["target", "medusa:3", "medusa-typical:3 (lossy)", "spec:4"]
        assert [float(line[3]) >= 0 for line in lines] == 4 * [True]  # set flush with its title
    assert code == 0 and "equal budget" not in text
    args = bench.parse([])
    assert bench.equal_budget(args, ["target", "eagle:16", "lookup:16", "tree:4x2x1", "hf"]) is None  # 4 + 8 + 8
    assert bench.equal_budget(args, ["target", "eagle:20", "lookup:20", "tree:4x2x1", "hf"]) == 20
    for other in ("eagle", "combined", "dynamic:cost", "multi", "hf-lookup:8"):
        assert bench.equal_budget(args, ["eagle:20", other]) is None


def test_two_prompt_files_of_one_name_are_refused(run, folders, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("Another line")
    with pytest.raises(SystemExit):
        run("--speed", 1, "--methods", "target", "--prompts", tmp_path / "prompts.txt")
    assert "two of --prompts are called prompts.txt" in capsys.readouterr().err


def test_the_table_lines_up(run):
    _, _, text = run("--speed", 1, "--methods", "target,spec", "--n-prompts", 1)
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line) == {"-", " "})
    head, *rows = lines[rule - 1], *lines[rule + 1 : rule + 3]
    ends = [i for i, c in enumerate(lines[rule] + " ") if c == " " and i and lines[rule][i - 1] == "-"][1:-1]
    for end in ends:  # all columns but the first and the last, which are words, are set flush right
        assert head[end - 1] != " " and all(row[end - 1] != " " for row in rows)
    assert "1 x prompts.txt of 6 tokens" in text


def test_sampling_is_reproducible_whatever_the_order(run, heads):
    flags = ("--speed", 1, "--methods", "target,spec,dynamic,multi,lookup,combined,tree,medusa:4,eagle:4,hf",
             "--temperature", 1, "--seed", 5, "--n-prompts", 1, *heads)
    _, first, _ = run(*flags)
    _, both, _ = run(*flags)
    for a, b in zip(first, both[len(first):]):
        if a["method"] != "combined":  # it is told costs that were measured anew
            assert all(a[key] == b[key] for key in ("method", "alpha", "mean_log_likelihood"))


def test_cost_aware_controller_runs_from_measured_costs(run):
    code, rows, text = run("--speed", 1, "--methods", "target,dynamic", "--controller", "cost")
    assert code == 0 and rows[1]["gamma"] == "cost"


def test_a_method_that_is_not_lossless_fails_the_run(run, bench, monkeypatch):
    monkeypatch.setitem(bench.TABLE, "spec", replace(bench.TABLE["small"], lossless=True))
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
    assert not list(tmp_path.glob("results.partial*"))


def test_a_killed_run_is_recovered_by_the_next(run, bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "write_speed_rows", lambda *_: None)
    monkeypatch.setattr(bench.Journal, "clear", lambda _: None)  # as if the process had died before
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    run("--speed", 1, "--methods", "target,spec:2")
    monkeypatch.undo()
    journal, = tmp_path.glob("results.partial.*.jsonl")
    journal.write_text(journal.read_text()[:-40])  # the last line is cut off
    bench.recover(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["method"]: row["n_prompts"] for row in rows} == {"target": 3, "spec": 2} or \
           {row["method"]: row["n_prompts"] for row in rows} == {"target": 2, "spec": 3}
    assert all(row["ttft_s"] > 0 and row["pair"] == "target+small+mid" for row in rows)
    assert [(row["gamma"], row["label"]) for row in rows if row["method"] == "spec"] == [(2, "spec:2")]
    assert "recovered" in (tmp_path / "results.txt").read_text() and not journal.exists()


def test_sigterm_ends_a_run_also_in_the_background(folders, tmp_path):
    """A shell without job control starts what is in the background with SIGINT ignored."""
    (tmp_path / "prompts.txt").write_text("one two three\n")
    words = [sys.executable, ROOT / "test.py", "--target", folders / "target", "--draft", folders / "small", "--device",
             "cpu", "--speed", "1", "--prompts", tmp_path / "prompts.txt", "--max-len", "60", "--repeats", "100000",
             "--threads", "1", "--out", tmp_path]
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    try:
        for _ in range(600):
            journals = list(tmp_path.glob("results.partial*"))
            if journals and len(journals[0].read_text().splitlines()) > 20:
                break
            time.sleep(0.1)
        process.terminate()
        assert "interrupted" in process.communicate(timeout=30)[1] and process.returncode == 130
    finally:
        process.kill()
    assert (tmp_path / "results.jsonl").read_text() and not list(tmp_path.glob("results.partial*"))


def test_the_journal_of_a_living_run_is_left_alone(run, bench, tmp_path):
    with bench.Journal(tmp_path) as other:
        other.write({"meta": {"date": "", "commit": "", "command": "another run"}, "text": "x"})
        code, rows, text = run("--speed", 1, "--methods", "target", "--n-prompts", 1)
        assert code == 0 and "recovered" not in text and other.path.exists()
    assert not list(tmp_path.glob("results.partial*"))


def test_a_journal_whose_name_was_taken_away_before_it_was_locked_is_made_anew(bench, monkeypatch, tmp_path):
    lock, removed = bench.fcntl.flock, []

    def another_run_was_faster(file, how):
        if not removed:
            removed.extend(tmp_path.glob("results.partial*"))
            removed[0].unlink()
        lock(file, how)

    monkeypatch.setattr(bench.fcntl, "flock", another_run_was_faster)
    with bench.Journal(tmp_path) as journal:
        assert journal.path.exists() and journal.path != removed[0]


def test_generate_ends_at_the_context_and_its_own_defaults_are_set_aside(run, folders, tmp_path):
    """A repetition penalty in the model's own generation_config would bend the law of hf and hf-assisted."""
    config = json.loads((folders / "target" / "generation_config.json").read_text())
    penalised = tmp_path / "penalised"
    shutil.copytree(folders / "target", penalised)
    (penalised / "generation_config.json").write_text(json.dumps({**config, "repetition_penalty": 5.0}))
    (tmp_path / "long.txt").write_text(TEXT.replace("\n\n", " "))
    for temperature, names in ((0, "target,spec,hf,hf-assisted,hf-lookup"), (1, "target,hf")):
        code, rows, _ = run("--speed", 1, "--target", penalised, "--methods", names, "--prompts",
                            tmp_path / "long.txt", "--prompt-tokens", 250, "--temperature", temperature,
                            "--n-prompts", 1)
        found = [row["n_tokens"] for row in rows if row["text"] == "long.txt"]
        assert code == 0 and found[-2:] == [6, 6]  # the context has 256 positions


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


def test_a_draft_with_a_longer_context_writes_no_more_than_its_target_can_score(run, bench, folders, tmp_path):
    longer = tmp_path / "longer"
    shutil.copytree(folders / "small", longer)
    tiny_model("llama", seed=2, sharpness=20, vocab=300, positions=512).save_pretrained(longer)
    (tmp_path / "long.txt").write_text(TEXT.replace("\n\n", " "))
    flags = ["--target", folders / "target", "--draft", longer, "--speed", 1, "--methods", "small,target,draft-score",
             "--prompts", tmp_path / "long.txt", "--prompt-tokens", 250, "--max-len", 12, "--device", "cpu", "--out",
             tmp_path]
    assert bench.main([*map(str, flags)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["n_tokens"] for row in rows] == [6, 6, 6] and rows[0]["generated_ppl"] > 1


def test_a_tiny_temperature_is_greedy_for_everybody(run):
    code, rows, _ = run("--speed", 1, "--methods", "target,spec,hf,hf-assisted,hf-lookup", "--temperature", 1e-40,
                        "--n-prompts", 1)
    assert code == 0 and len({row["mean_log_likelihood"] for row in rows}) == 1


def test_methods_with_settings_stand_in_one_table(run, bench):
    labels = ["target", "spec:1", "spec:3", "lookup:2", "lookup:cost",
              *(f"dynamic:{name}" for name in bench.CONTROLLERS)]
    code, rows, text = run("--speed", 1, "--methods", ",".join(labels), "--n-prompts", 1)
    assert code == 0 and [row["label"] for row in rows] == labels
    assert [row["method"] for row in rows] == ["target", "spec", "spec", "lookup", "lookup"] + ["dynamic"] * 5
    assert [row["gamma"] for row in rows] == [None, 1, 3, 2, None, *bench.CONTROLLERS]
    assert [row["controller"] for row in rows] == [None] * 5 + list(bench.CONTROLLERS)
    assert max(rows[1]["gamma_log"]) == 1 and max(rows[2]["gamma_log"]) == 3 and rows[1]["mean_gamma"] <= 1
    assert len(rows[2]["proposed_at"]) <= 3 and "dynamic:confidence" in text and "costs     target step" in text


@pytest.mark.parametrize("engine", ["eager", "packed", "int8"])
def test_calls_and_time_are_seen_on_every_engine(run, engine):
    """An engine may call a pass of its own in place of the model's."""
    code, rows, _ = run("--speed", 1, "--methods", "target,spec,hf", "--engine", engine, "--n-prompts", 2)
    by_name = {row["method"]: row for row in rows}
    assert code == 0 and {row["engine"] for row in rows} == {engine}
    assert by_name["target"]["target_forwards"] == by_name["hf"]["target_forwards"] == 12
    assert by_name["spec"]["target_forwards"] == pytest.approx(12 / by_name["spec"]["tokens_per_round"])
    assert 0 < by_name["target"]["loop_share"] < 1 and 0 < by_name["spec"]["loop_share"] < 1
    # Quantisation turns a float32's last bit into a level: transformers' pass of an int8 model has its own law.
    assert by_name["hf"]["lossless"] == (None if engine == "int8" else True)
    assert by_name["hf"]["law"] == ("int8 hf pass" if engine == "int8" else "target's")


def test_an_engine_that_cannot_be_had_is_named_with_its_reason(run):
    _, rows, text = run("--speed", 1, "--methods", "target", "--engine", "graphs", "--n-prompts", 1)
    assert rows[0]["engine"] == "eager" and "engine eager (target: eager (graphs needs CUDA)" in text


def test_predicted_speedup_is_that_of_the_rounds_behind_the_first():
    """Against the formula by hand: a target step 10 ms, v = 1, 1.2, 1.4, ...; drafts of 2 and 3 ms, 4 and 7 behind
    another model's pass, 5 ms wide."""
    s = SimpleNamespace(costs=Costs(0.010, 0.003, [1 + 0.2 * n for n in range(11)]), drafts=[None, None],
                        draft_times=[(0.004, 0.002, 0.002), (0.007, 0.003, 0.005)],
                        tree_times={"tree:3x1": (0.008, 0.006, 0.0)})
    out = Generation(rounds=[Round(4, 4, 5), Round(4, 1, 2), Round(2, 2, 3), Round(0, 0, 1)])
    watch = SimpleNamespace(draft_calls_later=lambda: [(0, 0), (6, 2)])
    rounds = 0.018 + 0.014 + 0.010  # of the target over 5, 3 and 1 tokens
    spec = rounds + 4 * 0.003 + 2 * 0.007
    assert methods.speedup_of_run(s, "spec", out, watch, 7) == pytest.approx(6 * 0.010 / spec)
    watch.draft_calls_later = lambda: [(7, 3), (2, 2)]
    rounds_and_stages = rounds + 4 * 0.002 + 3 * 0.004 + 2 * 0.005
    assert methods.speedup_of_run(s, "multi", out, watch, 7) == pytest.approx(6 * 0.010 / rounds_and_stages)
    watch.draft_calls_later = lambda: [(0, 0), (0, 0)]
    assert methods.speedup_of_run(s, "lookup", out, watch, 7) == pytest.approx(6 * 0.010 / rounds)
    assert methods.speedup_of_run(s, "hf-assisted", out, watch, 7) is None
    trees = Generation(rounds=[Round(4, 4, 5), Round(2, 1, 2, nodes=6), Round(3, 3, 4, nodes=9)])
    watch.draft_calls_later = lambda: [(0, 0), (5, 2)]
    rounds = 0.022 + 0.028  # of the target over 7 and 10 tokens
    assert methods.speedup_of_run(s, "eagle", trees, watch, 7) == pytest.approx(
        6 * 0.010 / (rounds + 3 * 0.003 + 2 * 0.007))
    s.tree_times["tree:2x2"] = (1.0, 1.0, 0.0)
    assert methods.speedup_of_run(s, "tree:3x1", trees, watch, 7) == pytest.approx(  # its passes are over several nodes
        6 * 0.010 / (rounds + 3 * 0.006 + 2 * 0.008))
    assert methods.speedup_of_run(s, "spec", Generation(rounds=[Round(4, 4, 5)]), watch, 7) is None
    s.drafts = [None]  # the second is a head now, and reads the prompt behind the first round
    s.draft_times[1] = (0.007, 0.003, 0.0005)
    assert methods.speedup_of_run(s, "eagle", trees, watch, 40) == pytest.approx(
        6 * 0.010 / (rounds + 3 * 0.003 + 2 * 0.007 + 40 * 0.0005))
    watch.draft_calls_later = lambda: [(0, 0), (0, 0)]  # lookup alone proposed
    assert methods.speedup_of_run(s, "lookup+eagle", trees, watch, 40) == pytest.approx(6 * 0.010 / rounds)


def test_costs_are_measured_for_every_gamma_of_the_run(bench, folders):
    args = bench.parse(["--target", str(folders / "target"), "--draft", str(folders / "small"), "--draft",
                        str(folders / "mid"), "--device", "cpu", "--max-len", "60"])
    s = bench.set_up(args, for_ppl=False)
    bench.prepare_costs(s, ["target", "hf"], 6)
    assert s.costs is None  # nobody drafts
    bench.prepare_costs(s, ["spec:20", "multi"], 6)
    assert len(s.costs.v) == 21 and s.costs.v[0] == 1 and min(s.costs.v) > 0 and len(s.draft_times) == 2
    bench.prepare_costs(s, ["spec:500"], 250)
    assert len(s.costs.v) == 60  # a round of 60 tokens proposes no more than 59
    assert s.costs.t_draft == s.draft_times[0][1]  # the draft alone is the smallest
    assert s.costs.start >= 0


def test_costs_where_the_drafts_context_is_short(bench, folders):
    """Lookup proposes what it likes; the drafts' passes are measured where they fit."""
    args = bench.parse(["--target", str(folders / "target"), "--draft", str(folders / "small"), "--draft",
                        str(folders / "mid"), "--device", "cpu", "--max-len", "60"])
    s = bench.set_up(args, for_ppl=False)
    s.drafts = [tiny_model("llama", positions=positions) for positions in (6, 9)]
    s.draft = s.drafts[0]
    bench.prepare_costs(s, ["lookup:32", "spec", "multi"], 20)
    assert len(s.costs.v) == 33 and len(s.draft_times) == 2
    s.drafts = [tiny_model("llama", positions=methods.TRIAL_TOKENS + 20)]
    s.draft = s.drafts[0]
    bench.prepare_costs(s, ["tree:2x2"], methods.TRIAL_TOKENS + 30)
    assert min(s.tree_times["tree:2x2"][:2]) > 0
    s.args.max_len = 1
    bench.prepare_costs(s, ["spec"], 1000)  # a prompt that fills the target's context
    assert len(s.costs.v) == 2


def test_a_pass_behind_another_models_is_told_from_the_next_ones(folders, bench):
    """Each round of gamma 3 calls the draft three times, the first of them behind the target's pass."""
    args = bench.parse(["--target", str(folders / "target"), "--draft", str(folders / "small"), "--device", "cpu"])
    s = bench.set_up(args, for_ppl=False)
    with methods.Watch(s) as watch:
        out = methods.decoded(s, "spec:3", [5, 6, 7], SamplingParams(0, max_new_tokens=30), watch.committed)
    calls, firsts = watch.draft_calls_later()[0]
    later = [r.proposed for r in out.rounds[1:]]
    assert (calls, firsts) == (sum(later), sum(g > 0 for g in later))


# ------------------------------------------------------------------------------------- heads and trees


def test_settings_of_trees_stand_in_their_rows(run, heads):
    labels = ["target", "tree", "tree:3x1", "medusa:3", "eagle:4", "mtp:6", "lookup+medusa:2", "lookup+eagle:5",
              "lookup+mtp:3", "eagle-1:7", "eagle-1", "medusa-typical:3"]
    code, rows, text = run("--speed", 1, "--methods", ",".join(labels), "--n-prompts", 2, "--tree-rule", "top-k",
                           *heads)
    assert code == 0 and [row["label"] for row in rows] == labels
    assert [row["node_budget"] for row in rows] == [None, 10, 6, 3, 4, 6, 2, 5, 3, 7, 8, 3]
    assert [row["tree_rule"] for row in rows] == [None] + 10 * ["top-k"] + ["typical"]
    assert {row["gamma"] for row in rows} == {None} and [row["lossless"] for row in rows] == 11 * [True] + [False]
    for row in rows[1:]:  # the first round reads the prompt, and the last ones may have room for less
        assert row["nodes_per_round"] < row["node_budget"]
        if not row["method"].startswith("lookup"):  # there, neither may pay
            assert 0 < row["nodes_per_round"] and 0 <= row["accepted_depth"] <= len(row["accepted_at"])
    assert rows[3]["tree"] == [[0], [1], [0, 0]] and "tree" not in rows[4]
    assert rows[3]["expected_tokens"] == 1 + 0.5 + 0.25 + 0.5 * 0.375
    assert "medusa:3: a tree of 3 nodes, from which 1.94 tokens per round are expected on greedy text; " in text
    assert rows[11]["expected_tokens"] is None and "medusa-typical:3: a tree" not in text
    assert "\nheads     medusa: c = " in text and ", eagle: c = " in text
    titles = tables(text)["method"][0]
    assert titles[titles.index("tok/round") + 1 :][:2] == ["nodes", "depth"]


def test_columns_of_trees_are_there_only_with_a_tree(run):
    _, _, text = run("--speed", 1, "--methods", "target,spec", "--n-prompts", 1)
    assert not {"nodes", "depth"} & set(tables(text)["method"][0]) and "of a tree" not in text


def test_a_lossy_rule_is_marked_and_not_held_against_the_target(run, heads, folders, bench):
    code, rows, text = run("--speed", 1, "--methods", "target,medusa-typical:3", "--n-prompts", 1, *heads)
    assert code == 0 and (rows[1]["lossless"], rows[1]["law"]) == (False, "lossy") and "greedy ids" not in text
    args = bench.parse(["--target", str(folders / "target"), "--device", "cpu", "--methods", "medusa",
                        *map(str, heads)])
    s, params = bench.set_up(args, for_ppl=False), SamplingParams(1.0, max_new_tokens=24)
    texts = {label: {tuple(methods.decoded(s, label, [5, 6, 7], replace(params, seed=seed)).tokens)
                     for seed in range(4)} for label in ("medusa:3", "medusa-typical:3")}
    # Behind the first round, which proposes nothing and draws, typical acceptance leaves nothing to chance.
    assert len(texts["medusa:3"]) == 4
    ends = {}
    for text in texts["medusa-typical:3"]:
        assert ends.setdefault(text[0], text) == text


@pytest.mark.parametrize("engine", ["eager", "packed", "int8"])
def test_passes_of_heads_are_counted_and_timed_on_every_engine(folders, bench, heads, engine):
    args = bench.parse(["--target", str(folders / "target"), "--draft", str(folders / "small"), "--device", "cpu",
                        "--methods", "spec,medusa,eagle,mtp", "--engine", engine, *map(str, heads)])
    s = bench.set_up(args, for_ppl=False)
    assert list(s.heads) == ["medusa", "eagle", "mtp"] and s.engine == engine
    expected = methods.decoded(s, "target", [5, 6, 7], SamplingParams(0, max_new_tokens=24)).tokens
    for slot, label in enumerate(("medusa:3", "eagle:4", "mtp:4"), 2):  # behind target and draft
        with methods.Watch(s) as watch:
            out = methods.decoded(s, label, [5, 6, 7], SamplingParams(0, max_new_tokens=24), watch.committed)
        assert out.tokens == expected
        assert watch.calls[slot] == out.draft_forwards > 0 and watch.calls[0] == out.target_forwards
        assert sum(watch.calls) == watch.calls[slot] + watch.calls[0]
        calls, firsts = watch.draft_calls_later()[slot - 1]
        assert calls == watch.calls[slot] and firsts == sum(r.nodes > 0 for r in out.rounds)
        assert 0 < sum(map(sum, watch.times.values()))


def test_what_passes_of_heads_cost_is_measured_before_and_told_to_the_drafters(folders, bench, heads):
    args = bench.parse(["--target", str(folders / "target"), "--draft", str(folders / "small"), "--device", "cpu",
                        "--methods", "spec,medusa,eagle,lookup+mtp", *map(str, heads)])
    s = bench.set_up(args, for_ppl=False)
    bench.prepare_costs(s, args.methods, 6)
    assert len(s.costs.v) == methods.MAX_NODES + 1 and len(s.chain_v) == methods.MAX_GAMMA + 1
    assert len(s.draft_times) == 4 and min(min(times[:2]) for times in s.draft_times) > 0
    first, later, _ = s.draft_times[2]
    c, start = s.head_costs("eagle")
    assert c == later / s.costs.t_target and start == max(0, first - later) / s.costs.t_target
    drafter = methods.DRAFTERS["eagle"](s, None)
    assert (drafter.measured.v, drafter.measured.c, drafter.measured.start) == (s.costs.v, c, start)
    bench.prepare_costs(s, ["eagle:100"], 6)
    assert len(s.costs.v) == 101 and len(s.tree_v) == methods.MAX_NODES + 1
    bench.prepare_costs(s, ["tree:2x2", "tree:3x1x1"], 6)
    assert len(s.costs.v) == methods.MAX_GAMMA + 1
    assert set(s.tree_times) == {"tree:2x2", "tree:3x1x1"} and all(min(t[:2]) > 0 for t in s.tree_times.values())


def test_lookup_beside_a_head_keeps_to_its_nodes():
    """A text that repeats itself is proposed as far as it may be."""
    s = SimpleNamespace(head_costs=lambda kind: (0.1, 0.0), tree_v=[1 + 0.001 * n for n in range(65)])
    for nodes, most in ((1, 1), (16, 16), (100, 64), (None, 64)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(methods.DRAFTERS, "eagle", lambda s, nodes: NGramDrafter())
            drafter = methods.beside_lookup(s, "eagle", nodes)
        assert drafter.lookup.gamma.propose() == most


def test_a_heads_step_is_all_that_lies_between_its_passes(monkeypatch, folders, bench, heads):
    """A clock that goes on by 1.25 in the first pass of EAGLE's head in a round, 0.25 in later ones, 0.5 in Medusa's,
    by 2 and 3 where they pick children, 7 where the tree is made, and 100 for each token of the prompt that is read."""
    args = bench.parse(["--target", str(folders / "target"), "--device", "cpu", "--methods", "medusa,eagle",
                        *map(str, heads)])
    s = bench.set_up(args, for_ppl=False)
    now = [0.0]
    monkeypatch.setattr(methods, "clock", lambda device: now[0])

    def slow(of, name, seconds):
        plain = getattr(of, name)

        def wrapped(*args, **more):
            now[0] += seconds(args)
            return plain(*args, **more)
        monkeypatch.setattr(of, name, wrapped)

    head = methods.HEADS
    slow(head["eagle"], "forward", lambda args: 0.25 + (args[9] == 1) + 100 * len(args[1]) * (len(args[1]) > 12))
    slow(head["medusa"], "forward", lambda args: 0.5)
    slow(sys.modules["eagle"].EagleDrafter, "children", lambda args: 2.0)
    slow(sys.modules["eagle"].Growth, "of", lambda args: 7.0)
    slow(sys.modules["medusa"], "largest", lambda args: 3.0)
    params = SamplingParams(0)

    def times(kind):
        slot = 1 + list(s.heads).index(kind)
        return methods.trial_times(s, slot, lambda: methods.DRAFTERS[kind](s, methods.TRIAL_NODES), 20, params)

    assert times("eagle") == (1.25 + 2 + 7, 2.25, pytest.approx(100))
    assert times("medusa") == (3.5, 3.5, 0)


def test_of_two_trials_the_quicker_one_tells_what_a_head_costs(monkeypatch, folders, bench, heads):
    """In a bad moment of the machine its passes seem dear, and it would rest from then on."""
    args = bench.parse(["--target", str(folders / "target"), "--device", "cpu", "--methods", "medusa",
                        *map(str, heads)])
    s = bench.set_up(args, for_ppl=False)
    told = iter([(4.0, 0.5, 0.2), (3.0, 1.0, 0.1)])
    monkeypatch.setattr(methods, "times_of_trial", lambda *_: next(told))
    times = methods.trial_times(s, 1, lambda: methods.DRAFTERS["medusa"](s, 2), 6, SamplingParams(0))
    assert times == (3.0, 0.5, 0.1)


def test_trees_are_told_by_the_rule_in_use(bench):
    def told(*flags):
        args = bench.parse(list(flags))
        names = ("tree", "medusa", "medusa-typical", "eagle", "eagle-1", "mtp", "lookup+eagle", "lookup+medusa")
        return [methods.tree_rule(args, name) for name in names]

    drawn = "without-replacement"
    assert told() == ["top-k", "top-k", "typical", *5 * ["top-k"]]
    assert told("--temperature", "0.7", "--tree-rule", "independent") == [
        "independent", "top-k", "typical", *4 * [drawn], "top-k"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_rule_that_is_told_is_that_of_the_trees(bench, folders, heads, temperature):
    args = bench.parse(["--target", str(folders / "target"), "--device", "cpu", "--methods", "medusa,eagle,mtp",
                        "--temperature", str(temperature), *map(str, heads)])
    s = bench.set_up(args, for_ppl=False)
    for name in ("medusa", "eagle", "eagle-1", "mtp"):
        drafter, seen = methods.DRAFTERS[name](s, 4), set()
        propose = drafter.propose

        def watched(*args):
            proposal = propose(*args)
            seen.update({proposal.rule} if isinstance(proposal, Tree) else ())
            return proposal

        drafter.propose = watched
        methods.drafted_sampling(s.target, drafter, [5, 6, 7], SamplingParams(temperature, max_new_tokens=8, seed=0))
        assert seen == {methods.tree_rule(args, name)}


def test_what_is_expected_of_a_tree_is_of_greedy_text(run, heads):
    _, rows, text = run("--speed", 1, "--methods", "target,medusa:3", "--n-prompts", 1, "--temperature", 1, *heads)
    assert rows[1]["tree"] and rows[1]["expected_tokens"] is None and "are expected" not in text


def test_a_pairs_head_that_cannot_be_read_is_left_out_and_one_that_is_named_is_not(bench, folders, heads, tmp_path,
                                                                                monkeypatch, capsys):
    import loadModel
    monkeypatch.setattr(loadModel, "MODELS", tmp_path)
    for kind in ("eagle", "mtp"):
        shutil.copytree(folders / "heads" / kind, tmp_path / f"mine-{kind}")
    (tmp_path / "mine-eagle" / "model.safetensors").write_bytes(b"cut off")
    pair = replace(loadModel.PAIRS["smollm2"], heads={kind: f"mine-{kind}" for kind in ("eagle", "mtp")})
    target = load_model(folders / "target", torch.device("cpu"), torch.float32)
    assert list(bench.load_heads(bench.parse(["--methods", "eagle,mtp"]), pair, target)) == ["mtp"]
    said = capsys.readouterr().out
    assert said.startswith("left out: smollm2's eagle head, as the head in ") and said.count("\n") == 1
    with pytest.raises(ValueError, match="cannot be read"):
        bench.load_heads(bench.parse(["--methods", "eagle", "--heads", str(tmp_path / "mine-eagle")]), pair, target)


def test_a_missing_head_names_the_command_that_trains_it(run, capsys):
    code, rows, _ = run("--speed", 1, "--methods", "target,medusa,eagle:4,lookup+eagle", "--n-prompts", 1)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert code == 0 and [row["label"] for row in rows] == ["target"]
    assert [line.partition(" (")[0] for line in said] == [
        "left out, as target+small+mid has no medusa head: medusa",
        "left out, as target+small+mid has no eagle head: eagle:4, lookup+eagle"]
    assert "trainHeads.py --kind eagle" in said[1]


def test_a_pairs_heads_are_found_by_their_names_and_those_given_go_before(bench, folders, heads, tmp_path, monkeypatch):
    import loadModel
    monkeypatch.setattr(loadModel, "MODELS", tmp_path)
    for kind in ("eagle", "mtp"):
        shutil.copytree(folders / "heads" / kind, tmp_path / f"mine-{kind}")
    config = tmp_path / "mine-eagle" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "limit": 99}))
    assert list(loadModel.PAIRS["smollm2"].heads) == list(methods.HEADS)
    pair = replace(loadModel.PAIRS["smollm2"], heads={kind: f"mine-{kind}" for kind in methods.HEADS})
    target = load_model(folders / "target", torch.device("cpu"), torch.float32)

    def found(*flags):
        loaded = bench.load_heads(bench.parse(list(map(str, flags))), pair, target)
        return {kind: head.config.get("limit") for kind, head in loaded.items()}

    assert found("--methods", "medusa,eagle") == {"eagle": 99}  # no medusa is there, and nobody asks for mtp
    assert found("--methods", "lookup+eagle,mtp:4") == {"eagle": 99, "mtp": 8192}
    assert found("--methods", "eagle", "--heads", folders / "heads" / "eagle") == {"eagle": 8192}


def test_heads_of_another_target_are_refused(run, folders, heads, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--speed", 1, "--methods", "target,eagle", "--target", folders / "small", *heads)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "was trained for" in error and error.count("\n") == 1
    with pytest.raises(SystemExit):
        run("--speed", 1, "--methods", "target,eagle", "--heads", folders / "heads" / "mtp", folders / "heads" / "mtp")
    assert "two heads of kind mtp" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- peers


class FakeLlama:
    """What peers.LlamaCpp calls of the package llama_cpp: the target itself, greedy, token by token."""

    def __init__(self, model_path, n_ctx, n_threads, n_threads_batch, n_gpu_layers, verbose):
        from loadModel import load_model
        self.model = load_model(Path(model_path).parent, torch.device("cpu"), torch.float32)
        self.context, self.calls, self.threads = n_ctx, [], n_threads

    def close(self):
        pass

    def reset(self):
        self.calls.append("reset")

    def set_seed(self, seed):
        self.calls.append(seed)

    def generate(self, tokens, **sampling):
        self.calls.append(sampling)
        ids = list(tokens)
        while True:
            assert len(ids) < self.context
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
            yield ids[-1]


@pytest.fixture
def llama_cpp(folders, monkeypatch):
    """The package and a GGUF file, both made up."""
    gguf = folders / "target" / "target.Q4_1.gguf"
    gguf.touch()
    monkeypatch.setattr(peers, "MODELS", folders / "target")
    module = SimpleNamespace(Llama=FakeLlama, __spec__=importlib.machinery.ModuleSpec("llama_cpp", None))
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    yield
    gguf.unlink()


@pytest.mark.parametrize("engine, law", [("packed", "target's"), ("int8", "int8 target's"), ("eager", "target's")])
def test_peers_run_on_unmodified_models_and_are_compared_over_all_prompts(run, folders, llama_cpp, engine, law):
    (folders / "other.txt").write_text("Line 9: the mat")
    code, rows, text = run("--peers", "--engine", engine, "--prompts", folders / "other.txt", "--n-prompts", 2)
    assert code == 0 and "DIFFERENT" not in text and "perplexity of" not in text
    each, together = [row for row in rows if row["text"] != "all"], [row for row in rows if row["text"] == "all"]
    labels = ["target", "spec", "dynamic:cost", "lookup:4", "lookup:8", "combined", "hf", "hf-assisted", "hf-lookup:4",
              "hf-lookup:8", "llama-cpp"]
    assert [row["label"] for row in each] == 2 * labels and [row["label"] for row in together] == labels
    for row in rows:
        theirs = row["method"].startswith("hf")
        assert row["engine"] == ("llama.cpp" if row["method"] == "llama-cpp" else "eager" if theirs else engine)
        assert row["law"] == ("llama.cpp" if row["method"] == "llama-cpp" else "target's" if theirs else law)
        assert row["lossless"] == (None if row["method"] == "llama-cpp" else True)
        if row["method"] not in ("dynamic", "combined"):  # they may find that drafting does not pay here
            assert (row["draft_forwards"] > 0) == (row["method"] in ("spec", "hf-assisted"))
    for row in together:
        assert row["n_prompts"] == 3 and row["vs_transformers"] > 0 and row["vs_llama_cpp"] > 0
    best = max((row for row in together if row["method"].startswith("hf")), key=lambda row: row["throughput"])
    assert best["vs_transformers"] == 1 and f"fastest method here ({best['label']})" in text
    # hf and its kin follow the float32 law, ours that of the engine: equality is asked within each law
    assert ("equal those of hf" in text) == (engine == "int8")


@pytest.fixture
def listed(folders):
    """The smallest draft with a list of what it may propose."""
    path = folders / "small" / FREQUENT_FILE
    np.save(path, np.arange(299, 0, -1, dtype=np.int32))
    yield
    path.unlink()


def test_a_draft_that_proposes_few_tokens(run, listed):
    code, rows, text = run("--speed", 1, "--methods", "small,target,spec,multi,hf-assisted", "--draft-vocab", 40)
    assert code == 0 and "equal the target's" in text and "<- small (proposes 40 tokens)" in text
    assert {row["draft_vocab"] for row in rows} == {40}
    code, rows, text = run("--speed", 1, "--methods", "target,spec", "--draft-vocab", 0)
    assert code == 0 and rows[-1]["draft_vocab"] == 300
    for parts in (("--ppl", 1), ("--ppl", 1, "--speed", 1, "--methods", "target,spec", "--n-prompts", 1,
                                   "--prompt-tokens", 8)):
        code, rows, text = run(*parts, "--prompts", "wikitext", "--draft-vocab", 40, "--ppl-tokens", 60)
        scored = [row for row in rows if row["method"].startswith("draft")][-2:]  # by a whole law: all tokens are there
        assert code == 0 and len(scored) == 2
        assert all(row["ppl"] is not None and row["draft_vocab"] == 300 for row in scored)


@pytest.mark.parametrize("engine", ["eager", "packed"])
def test_peers_draft_from_their_whole_vocabulary(bench, folders, listed, engine):
    s = bench.set_up(bench.parse(["--target", str(folders / "target"), "--draft", str(folders / "small"), "--peers",
                                  "--engine", engine, "--draft-vocab", "40", "--methods", "target,spec,hf-assisted"]),
                     for_ppl=False)
    ids = torch.arange(1, 9)
    whole, cut = (CachedModel(model).forward(ids) for model in (s.stock_draft, s.draft))
    assert whole.isfinite().all() and cut.isfinite().sum() == 40
    with methods.Watch(s) as watch:
        bench.decoded(s, "hf-assisted", ids.tolist(), SamplingParams(0.0, max_new_tokens=8))
    assert min(watch.calls) > 0


def test_peers_without_llama_cpp_say_so_in_one_line(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, rows, _ = run("--peers", "--methods", "target,hf,llama-cpp", "--n-prompts", 1)
    assert code == 0 and [row["method"] for row in rows] == ["target", "hf"] * 2
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert said == ["left out: llama-cpp, as the package llama_cpp is not installed (pip install llama-cpp-python)"]
    assert all(row["vs_llama_cpp"] is None for row in rows if row["text"] == "all")


def test_llama_cpp_without_a_file_names_the_command(llama_cpp, folders):
    assert peers.what_llama_cpp_lacks("target") is None
    assert peers.gguf_of("a/target") == folders / "target" / "target.Q4_1.gguf"
    assert "downloadModel.py --gguf" in peers.what_llama_cpp_lacks("other")


def test_llama_cpp_decodes_under_our_rules(llama_cpp, folders):
    """Our stopping, clock and sampling parameters around its generator."""
    llama = peers.LlamaCpp(folders / "target" / "target.Q4_1.gguf", threads=1, context=16)
    expected = llama.generate([3, 4, 5], SamplingParams(0, max_new_tokens=8)).tokens
    assert len(expected) == 8
    seen = []
    out = llama.generate([3, 4, 5], SamplingParams(0.5, 7, 0.9, 8, (expected[4],), seed=2**63), seen.extend)
    assert out.tokens == seen == expected[: expected.index(expected[4]) + 1] and out.finish_reason == "stop"
    assert llama.model.calls[-3] == "reset" and 0 <= llama.model.calls[-2] < 2**32
    assert llama.model.calls[-1] == {"temp": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.0, "typical_p": 1.0,
                                     "repeat_penalty": 1.0}
    assert out.n_first == 1 and out.target_forwards == len(out.tokens) and out.tpot > 0
    out = llama.generate([3] * 10, SamplingParams(0, max_new_tokens=8))
    assert len(out.tokens) == 6 and out.finish_reason == "context"
    assert llama.generate([3], SamplingParams(max_new_tokens=0)).finish_reason == "length"


def test_the_real_llama_cpp_repeats_itself():
    pytest.importorskip("llama_cpp")
    file = peers.gguf_of("SmolLM2-135M-Instruct")
    if file is None:
        pytest.skip("no GGUF file of SmolLM2-135M-Instruct (python downloadModel.py --gguf)")
    llama = peers.LlamaCpp(file, threads=1, context=64)
    prompt = [6403, 1980, 253, 655]  # "Once upon a time"
    greedy = [llama.generate(prompt, SamplingParams(0, max_new_tokens=6)) for _ in range(2)]
    assert greedy[0].tokens == greedy[1].tokens == [28, 260, 2240, 282, 23324, 27108]  # ", the city of Nova Haven"
    drawn = [llama.generate(prompt, SamplingParams(1.0, max_new_tokens=12, seed=seed)).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def record(throughput, prompt):
    out = generation(0.0, [([1], Round(0, 0, 1), 1 / throughput)])
    return run_record(out, prompt, 0, peak_memory_mb=1.0, loop_share=0.1)


def test_the_comparison_pairs_prompts_and_picks_the_fastest_of_transformers():
    runs = {"target": [record(1, "a"), record(2, "b"), record(4, "c")],
            "hf": [record(2, "a"), record(2, "b"), record(2, "c")],
            "hf-lookup:8": [record(1, "a"), record(5, "b"), record(5, "c")],
            "spec": [record(3, "a"), record(10, "b"), record(10, "c")]}
    rows = {row["label"]: row for row in peers.compare(runs)}
    assert rows["spec"]["vs_transformers"] == 2 and rows["spec"]["speedup"] == 3  # of 3, 2, 2 and of 3, 5, 2.5
    assert rows["hf-lookup:8"]["vs_transformers"] == 1 and rows["hf"]["vs_llama_cpp"] is None
    assert rows["target"]["vs_transformers"] == pytest.approx(0.8)


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


def test_the_chat_template_is_for_questions_not_for_running_text(bench, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "prompt_set", lambda *arguments: asked.append(arguments[-1]))
    s = SimpleNamespace(args=SimpleNamespace(prompt_tokens=None, chat=True), tokenizer=None)
    for name in ("wikitext", "pg19", "questions.jsonl", "gemma-text"):
        bench.prompts_of(s, name, 1)
    assert asked == [False, False, True, True]


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
    assert target["engine"] == spec["engine"] == "packed"
    assert math.isclose(target["ppl"], spec["ppl"], rel_tol=1e-5) and spec["max_deviation"] < 1e-5
    assert drawn["tv"] < 3 * drawn["tv_expected"] and drawn["p_value"] > 1e-4
    assert "max |emitted - p|" in text


def test_the_perplexity_of_a_quantised_target_stands_beside_the_float32_one(run):
    code, rows, _ = run("--ppl", 1, "--prompts", "wikitext", "--ppl-tokens", 120, "--window", 64, "--stride", 32,
                        "--tv-positions", 0, "--engine", "int8")
    assert code == 0 and [(r["method"], r["engine"]) for r in rows[:3]] == [
        ("target", "eager"), ("target", "int8"), ("draft small", "int8")]
    plain, quantised, spec = rows[0]["ppl"], rows[1]["ppl"], rows[-1]["ppl"]
    assert plain != quantised and abs(quantised / plain - 1) < 0.2 and math.isclose(quantised, spec, rel_tol=1e-4)
    code, rows, _ = run("--ppl", 1, "--prompts", "wikitext", "--ppl-tokens", 120, "--window", 64, "--stride", 32,
                        "--tv-positions", 0, "--engine", "eager")
    assert math.isclose(rows[-4]["ppl"], plain)


def test_show_prints_the_text_and_its_origin(run, heads, capsys):
    labels = ("spec", "lookup", "dynamic:cost", "combined", "tree", "medusa", "medusa-typical:3", "eagle-1",
              "lookup+eagle")
    code, rows, _ = run("--show", "--methods", ",".join(labels), "--max-len", 20, *heads)
    shown = capsys.readouterr().out
    assert code == 0 and not rows
    assert all(f"[{label}, " in shown for label in labels)
    assert "accepted, {+bonus}, {!corrected}" in shown
    assert "rounds for 20 tokens]" in shown


def test_a_token_behind_a_leaf_is_no_correction(run, bench, monkeypatch, capsys):
    """Each round proposes the right token without a child, and a wrong one with a child: nothing right is rejected."""
    class Oracle(Drafter):
        def propose(self, ids, limit):
            text = expected[ids.shape[0] - 3 :] if limit > 1 else []
            return Tree([text[0], text[0] + 1, 0], [-1, -1, 1], None, "top-k") if text else self.proposal(ids[:0], [])

    prompts = bench.prompts_of
    monkeypatch.setattr(bench, "prompts_of", lambda *arguments: [replace(prompts(*arguments)[0], ids=[5, 6, 7])])
    expected = []
    for drafter in (NGramDrafter, Oracle):
        monkeypatch.setitem(bench.DRAFTERS, "spec", lambda s, setting, drafter=drafter: drafter())
        monkeypatch.setattr(bench, "show_one", lambda *arguments, show=bench.show_one: (
            out := show(*arguments), expected.extend(out.tokens))[0])
        run("--show", "--methods", "spec", "--max-len", 13)
    shown = capsys.readouterr().out.rpartition("[spec")[2].partition("]")[2]
    assert "{+" in shown and "{!" not in shown and "7 rounds for 13 tokens" in shown


@pytest.mark.parametrize("flags, words", [
    (["--methods", "spec,warp"], "unknown method 'warp': --methods takes"),
    (["--gamma", "0"], "--gamma must be at least 1"),
    (["--methods", "spec:0"], "--methods spec:0: a gamma of 1 or more must follow"),
    (["--methods", "lookup:many"], "a gamma of 1 or more must follow"),
    (["--methods", "dynamic:fate"], "a controller must follow the colon: fixed, aimd"),
    (["--methods", "multi:4"], "multi takes no setting"),
    (["--methods", "eagle:0"], "--methods eagle:0: a number of nodes must follow the colon: 16"),
    (["--methods", "lookup+mtp:x"], "a number of nodes must follow"),
    (["--methods", "tree:2x0"], "how many children the nodes of each level have must follow the colon: 2x2x1"),
    (["--methods", "tree:9x9x9"], "--methods tree:9x9x9: 819 nodes are more than 512"),
    (["--methods", "medusa", "--nodes", "513"], "--methods medusa: 513 nodes are more than 512"),
    (["--nodes", "0"], "--nodes must be at least 1"),
    (["--tree-rule", "none"], "--tree-rule"),
    (["--methods", "medusa,lookup+eagle"], "none of --methods can run"),
    (["--heads", "no/such-head"], "no head in no/such-head: trainHeads.py trains one"),
    (["--peers", "--speed", "0"], "--peers is a speed part"),
    (["--engine", "warp"], "--engine"),
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
    monkeypatch.setitem(bench.TABLE, "target", replace(own, run=lambda s, ids, params, setting=None, on_tokens=None: (
        seeds.append(params.seed) or own.run(s, ids, params, setting, on_tokens))))
    run("--speed", 1, "--methods", "target", "--temperature", 1, "--seed", 7, "--n-prompts", 2, "--repeats", 2)
    assert sorted(seeds[1:]) == [7, 8, 1007, 1008]  # the first is the warm-up's


def test_the_readme_names_every_flag(bench, monkeypatch):
    seen = []
    monkeypatch.setattr(bench.argparse.ArgumentParser, "parse_args",
                        lambda self, _: seen.append(self) or bench.sys.exit())
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
    rows = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert [row["ppl"] for row in rows] == [None, 123456789]
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
