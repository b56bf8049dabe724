"""gpuCheck.py rehearsed on a CPU: the whole script, and that each check can fail."""

import math
import warnings

import pytest
import torch

import engine
import gpuCheck
import loadModel
from conftest import ran, tiny_model
from gpuCheck import Checks, misfit, tiny, waits_of, weights_read
from metrics import Results
from regrSampling import autoregressive_sampling
from test_graphs import small  # noqa: F401  (the engine graphs without a GPU)
from utils import sample

CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch, tmp_path, capsys):
    """script(*flags) -> (exit status, rows, text, stderr) of main() on a CPU, with tiny shapes and few samples."""
    monkeypatch.setitem(loadModel.PYTHIA, "70m", (1, 32, 4))
    monkeypatch.setitem(loadModel.PYTHIA, "410m", (3, 64, 4))
    for name, value in dict(ALPHAS=(0.5, 0.9), GAMMAS=(1, 3), MAX_GAMMA=4, WIDER=(9,), COPY=1 << 24, ROUNDS=300,
                            TEXTS=60, PREFIX=8, FAMILIES=("gpt_neox",)).items():
        monkeypatch.setattr(gpuCheck, name, value)

    few = ("--target", "410m", "--tokens", 16, "--runs", 1, "--repeats", 1)
    return lambda *flags: ran(gpuCheck.main, few, flags, tmp_path, capsys)


@pytest.fixture
def checks(tmp_path):
    return Checks(Results(tmp_path, {}))


def outcome(checks, check, *args):
    """Whether a check passes."""
    checks.failed.clear()
    check(checks, *args)
    return not checks.failed


def test_a_rehearsal_runs_every_part(script):
    code, rows, text, _ = script("--device", "cpu")
    by = {method: [row for row in rows if row["method"] == method] for method in
          ("gpu check", "gpu alone", "cost target", "cost draft", "simulated spec")}
    assert code == 0 and "\nall checks passed; " in text
    names = [row["check"] for row in by["gpu check"]]
    per_engine = ["engine", "rows, gpt_neox", "greedy ids, gpt_neox", "seeds"]
    assert names == 2 * per_engine + ["law of verify"] + [
        f"law of {method}, gpt_neox" for method in ("target", "spec", "lookup", "tree", "eagle")]
    assert all(row["result"] == "ok" and row["dtype"] == "float32" for row in by["gpu check"])
    assert [(row["model"], row["engine"]) for row in by["gpu alone"]] == [
        (f"pythia-{size}-random", name) for name in ("eager", "packed") for size in ("410m", "70m")]
    for row in by["gpu alone"]:
        assert row["limit_ms"] == pytest.approx(1e9 * row["weights_mb"] / row["bandwidth"])
        assert row["percent_of_limit"] == pytest.approx(100 * row["limit_ms"] / row["alone_ms"])
        assert row["same_ids"] == "yes"
    assert [row["widths"] for row in by["cost target"]] == 2 * [[1, 2, 3, 4, 5, 9]]
    assert [row["engine"] for row in by["cost target"]] == ["eager", "packed"]
    assert [(row["alpha_asked"], row["gamma"]) for row in by["simulated spec"]] == [(.5, 1), (.5, 3), (.9, 1), (.9, 3)]
    assert all(row["predicted"] > 0 and row["engine"] == "packed" for row in by["simulated spec"])
    assert "the bar of 65% is " in text and "engine eager\n" in text and "engine packed\n" in text


def test_a_failed_check_is_exit_status_1(script, monkeypatch):
    def accept_all(p, q, tokens, generator):
        return len(tokens), int(sample(p[-1:], generator))

    monkeypatch.setattr(gpuCheck, "verify", accept_all)
    monkeypatch.setattr(gpuCheck, "LAWS", ("target",))
    code, rows, text, _ = script("--device", "cpu")
    assert code == 1 and "\nFAILED: law of verify; " in text
    assert [row["result"] for row in rows if row.get("check") == "law of verify"] == ["FAILED"]
    assert rows[-1]["method"].startswith("simulated")  # what comes behind it is measured all the same


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda_one_line_and_exit_status_2(script):
    assert script() == (2, [], "", "gpuCheck.py: torch finds no CUDA GPU here; --device cpu rehearses the script\n")


@pytest.mark.parametrize("flags,said", [
    (("--tokens", 1), "--tokens must be at least 2"), (("--tokens", 2000), "--tokens must be at most 1024"),
    (("--target", "9b"), "choose from"), (("--device", "tpu"), "no device 'tpu'"), (("--runs", 0), "--runs"),
    (("--dtype", "int4"), "--dtype takes"), (("--out", "/nowhere"), "not a folder")])
def test_bad_flags_are_one_line(script, flags, said):
    code, rows, _, error = script("--device", "cpu", *flags)
    assert code == 2 and not rows and said in error and error.count("\n") == 1


def test_the_checks_pass_on_the_engine_graphs(small, checks, monkeypatch):  # noqa: F811
    """Its passes recorded as a capture would, also those of sampled texts."""
    monkeypatch.setattr(gpuCheck, "TEXTS", 30)
    for family in gpuCheck.FAMILIES:
        assert outcome(checks, gpuCheck.check_rows, family, "graphs", CPU)
        assert outcome(checks, gpuCheck.check_greedy, family, "graphs", CPU)
    assert outcome(checks, gpuCheck.check_law, "gpt_neox", "graphs", CPU)


def test_rows_that_see_ahead_are_found(checks, monkeypatch):
    plain = engine.causal_mask
    monkeypatch.setattr(engine, "causal_mask", lambda start, n, like: plain(start, n, like).clamp(min=-10))
    assert not outcome(checks, gpuCheck.check_rows, "llama", "packed", CPU)


def test_another_model_than_transformers_is_found(checks, monkeypatch):
    plain, slightly = engine.rms_norm, torch.nn.Softshrink(1e-3)
    monkeypatch.setattr(engine, "rms_norm", lambda module: torch.nn.Sequential(plain(module), slightly))
    assert not outcome(checks, gpuCheck.check_rows, "llama", "packed", CPU)


def test_other_greedy_ids_are_found(checks, monkeypatch):
    def wrong(target, draft, prompt, params):
        out = autoregressive_sampling(target, prompt, params)
        out.tokens[-1] += 1
        return out

    monkeypatch.setitem(gpuCheck.GREEDY, "spec", wrong)
    assert not outcome(checks, gpuCheck.check_greedy, "llama", "packed", CPU)


def test_the_drafts_law_is_not_the_targets(checks, monkeypatch):
    monkeypatch.setitem(gpuCheck.GREEDY, "spec", lambda target, draft, *how: autoregressive_sampling(draft, *how))
    monkeypatch.setattr(gpuCheck, "TEXTS", 150)
    gpuCheck.check_law(checks, "llama", "packed", CPU)
    assert checks.failed == ["law of spec, llama"]


def test_randomness_from_elsewhere_is_found(checks, monkeypatch):
    seeds = iter(range(100))
    plain = gpuCheck.SamplingParams
    monkeypatch.setattr(gpuCheck, "SamplingParams", lambda **how: plain(**{**how, "seed": next(seeds)}))
    assert not outcome(checks, gpuCheck.check_seeds, "packed", CPU)


def test_an_engine_that_is_not_there_is_found(checks, monkeypatch):
    for check in ("rows", "greedy", "seeds", "verify", "law", "waiting"):
        monkeypatch.setattr(gpuCheck, f"check_{check}", lambda *_: None)
    assert gpuCheck.run_checks(checks.results, ["eager", "packed"], CPU).failed == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setattr(engine, "what_is_missing", lambda model, name: "a GPU")
        assert gpuCheck.run_checks(checks.results, ["packed"], CPU).failed == ["engine"]


def test_misfit_against_known_laws():
    generator = torch.Generator().manual_seed(0)
    law = torch.rand(40, dtype=torch.double, generator=generator)
    law /= law.sum()

    def drawn(p, n=4000):
        return torch.bincount(torch.multinomial(p, n, replacement=True, generator=generator), minlength=40).double()

    scores = torch.tensor([misfit(drawn(law), law) for _ in range(200)])
    assert abs(scores.mean()) < 0.25 and 0.8 < scores.std() < 1.2  # standard deviations indeed
    assert misfit(drawn(law.roll(1)), law) > 5
    never = law.clone()
    never[3] = 0
    assert misfit(drawn(law), never / never.sum()) == math.inf
    assert misfit(drawn(never / never.sum()), never / never.sum()) < 5
    rare = torch.cat((law * 0.999, torch.full((500,), 0.001 / 500, dtype=torch.double)))
    counts = torch.cat((drawn(law), torch.zeros(500, dtype=torch.double)))
    assert abs(misfit(counts, rare)) < 5  # cells that hardly ever occur are one


def test_waits_are_counted_where_they_happen(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run():
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation")
        warnings.warn("something else")
        return "out"

    out, places = waits_of(run)
    assert out == "out" and list(places.values()) == [3] and next(iter(places)).startswith("test_gpuCheck.py:")
    assert modes == ["warn", "default"]


def test_too_much_waiting_is_found(checks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    assert outcome(checks, gpuCheck.check_waiting, "packed", CPU)  # a CPU tells of none
    plain = gpuCheck.waits_of
    monkeypatch.setattr(gpuCheck, "waits_of", lambda run: (plain(run)[0], gpuCheck.Counter({"utils.py:1": 500})))
    assert not outcome(checks, gpuCheck.check_waiting, "packed", CPU) and len(checks.failed) == 2 * len(gpuCheck.WAITS)


def test_the_weights_of_a_step_are_all_but_the_table_of_inputs():
    for tied in (False, True):
        model = tiny_model("llama", vocab=200, tie_word_embeddings=tied)
        whole = sum(p.numel() for p in model.parameters())
        assert weights_read(model) == 4 * (whole if tied else whole - 200 * 16)
        assert weights_read(model.half()) == 2 * (whole if tied else whole - 200 * 16)


def test_the_simulation_is_cut_to_the_time_that_is_left(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(gpuCheck, "simulate", lambda *how: asked.append(how[3].max_len) or True)
    costs = gpuCheck.measure_costs(*(gpuCheck.CachedModel(tiny("llama", CPU)) for _ in range(2)), 8, repeats=1)
    args = gpuCheck.argparse.Namespace(tokens=128, runs=2)
    for seconds in (1e6, 100.5 * 5 * 9 * 2 * costs.t_target, -5.0):
        gpuCheck.simulated_speedups(args, (None, None), costs, Results(tmp_path, {}), left=seconds)
    assert asked == [128, 70, 16]
