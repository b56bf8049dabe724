"""trainHeads.py: features against transformers' hidden states, resuming, what is shipped, what is refused."""
import json
import re
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import trainHeads
from heads import load_head, read_config
from test_trainDraft import ROOT, target_folder  # noqa: F401

SHIPPED = [ROOT / "models" / f"smollm2-{kind}" for kind in trainHeads.KINDS]
LAYER = ["inner=48", "heads=2", "limit=512"]
SMALL = {"eagle": LAYER, "medusa": ["heads=3"], "mtp": LAYER}


def arguments(folder, work, *more):
    return ["--target", str(folder), "--work", str(work), "--results", str(work), "--threads", "1", "--no-bf16",
            "--text", str(folder / "text.txt"), "--sample-rows", "8", "--sample-tokens", "1500", "--score-tokens",
            "600", "--batch-rows", "8", "--context", "48", "--vocab", "40", "--top-k", "8", "--held-prompts", "3",
            "--held-prompt-tokens", "8", "--held-new", "16", "--depths", "3", *more]


def run(folder, work, *more):
    return trainHeads.main(arguments(folder, work, *more))


@pytest.fixture(scope="module")
def work(target_folder, tmp_path_factory):  # noqa: F811
    """The stages before training."""
    work = tmp_path_factory.mktemp("heads.work")
    for stage in ("sample", "score", "features"):
        assert run(target_folder, work, "--only", stage) == 0
    return work


def state_of(folder):
    return load_file(folder / "model.safetensors")


# ---------------------------------------------------------------------------------------------------- features


@torch.inference_mode()
def test_the_shards_features_are_transformers_hidden_states(target_folder, work):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(target_folder).eval()
    kinds = set()
    for path in (work / "samples").glob("*.npz"):
        shard, features = np.load(path), np.load(path.with_suffix(".npy"))
        kinds.add(path.stem.split("-")[0])
        for ids, length, seen in zip(shard["ids"], shard["length"], features):
            out = model(torch.from_numpy(ids[None, : length - 1].astype(np.int64)), output_hidden_states=True)
            assert torch.allclose(out.hidden_states[-1][0], torch.from_numpy(seen[: length - 1]).float(), atol=4e-3)
            assert torch.allclose(model.lm_head(out.hidden_states[-1]), out.logits)
    assert kinds == {"sample", "score"}  # both ways that features come about


def test_features_that_are_there_stay(target_folder, work):  # noqa: F811
    before = {path: path.stat().st_mtime_ns for path in (work / "samples").glob("*.npy")}
    assert before
    assert run(target_folder, work, "--only", "features") == 0
    assert before == {path: path.stat().st_mtime_ns for path in (work / "samples").glob("*.npy")}


def test_a_batch_has_what_belongs_together(work):
    shards = trainHeads.HeadShards(work / "samples")
    args = trainHeads.parse(["--target", "x", "--context", "20", "--batch-rows", "5"])
    for seed in range(5):
        batch = trainHeads.teacher_batch(shards, args, np.random.default_rng(seed))
        rows, length = batch["ids"].shape
        assert length <= 20 and batch["keep"].shape == (rows, length)
        assert batch["features"].shape[:2] == batch["top"].shape[:2] == batch["logp"].shape[:2] == (rows, length - 1)
        ids, features, top = (batch[name][0].numpy() for name in ("ids", "features", "top"))
        places = [(s, row, at) for s in shards.loaded for row in range(len(s["ids"]))  # the text may stand in several
                  for at in range(s["ids"].shape[1] - length + 1) if (s["ids"][row, at : at + length] == ids).all()]
        assert any((s["features"][row, at : at + length - 1] == features).all()
                   and (s["top"][row, at : at + length - 1] == top).all() for s, row, at in places)


# ---------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("kind", sorted(trainHeads.KINDS))
def test_a_head_is_trained_and_shipped_with_its_card(target_folder, work, tmp_path, kind):  # noqa: F811
    held = str(target_folder / "held.txt")
    assert run(target_folder, work, "--only", "train", "--kind", kind, "--out", str(tmp_path / kind), "--steps", "4",
               "--option", *SMALL[kind], "--held-out", held, "--results", str(tmp_path), "--tree-nodes", "6") == 0
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    head = load_head(tmp_path / kind, target, trainHeads.KINDS)
    assert len(head.ids) == 40 and head.kind == kind
    card = (tmp_path / kind / "README.md").read_text()
    assert f"--kind {kind}" in card and "text.txt" in card and "4 steps" in card
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    everything = next(row for row in rows if row["text"] == "all")
    assert everything["method"] == "agreement" and everything["head"] == kind and len(everything["agreement"]) == 3
    assert everything["tokens_per_round"] is None and 1 <= everything["expected_tokens"] <= 4
    assert "(float32 arithmetic)" in card and "smollm2-draft-small" not in card
    assert f"{everything['agreement'][0]:.3f}" in card
    if kind == "medusa":
        assert len(head.config["tree"]) == 6 and len(head.config["accuracy"]) == 3
        assert "The sparse tree has 6 nodes" in card and "that was not trained on" in card
    assert run(target_folder, work, "--evaluate", str(tmp_path / kind), "--held-out", held, "--results",
               str(tmp_path)) == 0
    again = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()][len(rows):]
    assert [row["agreement"] for row in again] == [row["agreement"] for row in rows]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(target_folder, work, tmp_path):  # noqa: F811
    common = ["--only", "train", "--teacher", str(work / "samples"), "--option", *SMALL["eagle"]]
    for name, stops in (("whole", ["6"]), ("parts", ["3", "6"])):
        for steps in stops:  # the rate decays with the progress: both know of six steps
            trainHeads.DECAY, before = 1e-9, trainHeads.DECAY
            try:
                assert run(target_folder, tmp_path / name, *common, "--results", str(tmp_path), "--out",
                           str(tmp_path / name / "head"), "--steps", steps) == 0
            finally:
                trainHeads.DECAY = before
    whole, parts = state_of(tmp_path / "whole" / "head"), state_of(tmp_path / "parts" / "head")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_guesses_of_one_who_knows_are_all_right():
    class Knowing(torch.nn.Module):
        def guesses(self, ids, features, depths):
            out = torch.full((depths, 1, features.shape[1]), -1)
            for k in range(1, depths + 1):
                n = max(0, ids.shape[1] - 1 - k)
                out[k - 1, 0, :n] = ids[0, 1 + k :]
            return out

    class Ignorant(Knowing):
        def guesses(self, ids, features, depths):
            out = super().guesses(ids, features, depths)
            out[1] = -1
            return out

    rows = [dict(source=name, prompt=5, ids=list(range(i, i + 20)), features=torch.zeros(19, 4))
            for i, name in enumerate("aab")]
    knows, ignorant = (trainHeads.evaluate(head, rows, 3) for head in (Knowing(), Ignorant()))
    assert list(knows) == ["a", "b", "all"] and knows["all"]["prompts"] == 3
    assert knows["all"]["positions"] == 3 * 12  # known: the prompt ... the last one with three tokens behind it
    assert knows["a"]["agreement"] == [1, 1, 1] and knows["a"]["expected"] == 4
    assert ignorant["a"]["agreement"] == [1, None, 1] and ignorant["a"]["expected"] == 2  # it says nothing there
    assert trainHeads.shown(ignorant["a"]["agreement"]) == ["1.000", "-", "1.000"]
    assert "1.000 -     1.000" in trainHeads.agreement_lines(ignorant)


@pytest.mark.parametrize("kind", sorted(trainHeads.KINDS))
def test_held_out_texts_that_end_at_once_do_not_count(target_folder, kind):  # noqa: F811
    target = AutoModelForCausalLM.from_pretrained(target_folder).eval()
    head = small_head(kind, target)
    long = dict(source="a", prompt=4, ids=list(range(3, 15)))
    short = [dict(source="b", prompt=n, ids=list(range(3, 3 + m))) for n, m in ((4, 5), (4, 7), (1, 2), (11, 12))]
    rows = trainHeads.with_features(target, [long, *short])
    figures = trainHeads.evaluate(head, rows, 3)
    assert list(figures) == ["a", "all"] and figures["all"] == figures["a"]
    assert (figures["a"]["prompts"], figures["a"]["positions"]) == (1, 5)
    assert trainHeads.evaluate(head, rows[1:], 3) == {}


def small_head(kind, target):
    options = dict(option.split("=") for option in SMALL[kind])
    torch.manual_seed(0)
    head = trainHeads.KINDS[kind](32, 64, 40, **{name: int(value) for name, value in options.items()})
    head.bind(target, torch.arange(3, 43))
    head.start(tied=False)
    return head.eval()


@pytest.fixture(scope="module")
def medusa(target_folder, work, tmp_path_factory):  # noqa: F811
    """A trained Medusa head, from which Medusa-2 goes on."""
    out = tmp_path_factory.mktemp("medusa") / "medusa"
    assert run(target_folder, out.parent, "--teacher", str(work / "samples"), "--only", "train", "--kind", "medusa",
               "--option", *SMALL["medusa"], "--out", str(out), "--steps", "3") == 0
    assert "Not measured" in (out / "README.md").read_text()  # there were no held-out texts
    return out


def joint(target_folder, work, medusa, folder, *more):  # noqa: F811
    """Medusa-2 with its checkpoint in `folder`/work and its models in `folder`/joint."""
    folder.mkdir(exist_ok=True)
    return run(target_folder, folder / "work", "--teacher", str(work / "samples"), "--only", "train", "--kind",
               "medusa", "--held-out", str(target_folder / "held.txt"), "--results", str(folder), "--out", str(medusa),
               "--joint", str(folder / "joint"), "--joint-lr", "1e-3", *more)


def test_medusa2_trains_the_target_and_reports_its_drift(target_folder, work, medusa, tmp_path, capsys,  # noqa: F811
                                                         monkeypatch):
    features = []
    calibrate = trainHeads.calibrate
    monkeypatch.setattr(trainHeads, "calibrate", lambda head, batches: calibrate(head, [
        features.append((batch["ids"], batch["features"])) or batch for batch in batches]))
    assert joint(target_folder, work, medusa, tmp_path, "--steps", "3") == 0
    said = re.search(r"perplexity on (\d+) held-out tokens is ([\d.]+), and was ([\d.]+)[.]", capsys.readouterr().out)
    assert int(said[1]) == 24 and said[2] != said[3]
    old, new = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (target_folder, tmp_path / "joint"))
    assert not torch.equal(old.model.layers[0].mlp.up_proj.weight, new.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(old.get_input_embeddings().weight, new.get_input_embeddings().weight)
    head = load_head(tmp_path / "joint" / "medusa", new, trainHeads.KINDS)
    assert head.kind == "medusa" and read_config(tmp_path / "joint" / "medusa")["target"] == "joint"
    # The output rows are the target's, in training too.
    saved = torch.load(tmp_path / "work" / "medusa2.pt", weights_only=True)["model"]
    assert torch.equal(saved["0.out.weight"], old.lm_head.weight[saved["0.ids"]])
    assert not torch.equal(saved["0.inner.0.weight"], load_head(medusa, old, trainHeads.KINDS).inner[0].weight)
    with torch.inference_mode():  # calibrated on the target as it is now
        assert features
        for ids, seen in features:
            assert torch.allclose(new.model(ids[:, :-1]).last_hidden_state, seen, atol=1e-5)
    # All that is reported is of the target as it is now.
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    drift = next(row for row in rows if row["method"] == "drift")
    assert (f"{drift['ppl']:.3f}", f"{drift['ppl_before']:.3f}", drift["n_tokens"]) == (said[2], said[3], 24)
    assert {row["target"] for row in rows} == {"joint"} and {row["head"] for row in rows} == {"medusa"}
    card = (tmp_path / "joint" / "medusa" / "README.md").read_text()
    assert said[0] in card and "for `joint` and no other" in card and "--joint" in card


def test_medusa2_is_held_against_what_the_joint_target_writes(target_folder, work, medusa, tmp_path,  # noqa: F811
                                                              monkeypatch):
    seen = []
    evaluate = trainHeads.evaluate
    monkeypatch.setattr(trainHeads, "evaluate", lambda head, held, n: seen.append(held) or evaluate(head, held, n))
    assert joint(target_folder, work, medusa, tmp_path, "--steps", "8", "--joint-lr", "3e-2") == 0
    new = AutoModelForCausalLM.from_pretrained(tmp_path / "joint").eval()
    old = AutoModelForCausalLM.from_pretrained(target_folder).eval()
    others = 0
    for row in seen[0]:
        prompt = torch.tensor([row["ids"][: row["prompt"]]])
        text, before = (model.generate(prompt, max_new_tokens=16, do_sample=False)[0].tolist() for model in (new, old))
        assert row["ids"] == text
        others += text != before
    assert others  # else the test could not tell the targets apart


def test_medusa2_that_was_stopped_goes_on_as_if_it_had_not(target_folder, work, medusa, tmp_path,  # noqa: F811
                                                           monkeypatch, capsys):
    assert joint(target_folder, work, medusa, tmp_path / "whole", "--steps", "4") == 0
    step = trainHeads.train_step

    def stopped(*args):
        if args[4] == 2:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(trainHeads, "train_step", stopped)
    assert joint(target_folder, work, medusa, tmp_path / "parts", "--steps", "4", "--save-seconds", "0") == 130
    assert capsys.readouterr().err.strip().endswith("stopped; the same command goes on from here")
    monkeypatch.setattr(trainHeads, "train_step", step)
    assert joint(target_folder, work, medusa, tmp_path / "parts", "--steps", "4") == 0
    for name in ("joint", "joint/medusa"):
        whole, parts = state_of(tmp_path / "whole" / name), state_of(tmp_path / "parts" / name)
        assert all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.parametrize("kind", sorted(trainHeads.KINDS))
def test_a_trained_head_goes_on(target_folder, work, tmp_path, kind):  # noqa: F811
    common = ["--only", "train", "--kind", kind, "--teacher", str(work / "samples"), "--results", str(tmp_path)]
    assert run(target_folder, tmp_path / "one", *common, "--out", str(tmp_path / "one"), "--steps", "3", "--option",
               *SMALL[kind]) == 0
    first, kept = state_of(tmp_path / "one"), (tmp_path / "one" / "README.md").read_text()
    assert run(target_folder, tmp_path / "two", *common, "--out", str(tmp_path / "two"), "--steps", "1", "--vocab",
               "30", "--lr", "1e-9", "--start", str(tmp_path / "one")) == 0
    second = state_of(tmp_path / "two")
    assert all(torch.allclose(first[name].float(), second[name].float(), atol=1e-6) for name in first)  # 40 ids, too
    # The checkpoint of new heads in the same --work is another run's.
    assert run(target_folder, tmp_path / "one", *common, "--out", str(tmp_path / "two"), "--steps", "3", "--start",
               str(tmp_path / "one")) == 0
    third = state_of(tmp_path / "two")
    assert not all(torch.equal(first[name], third[name]) for name in first)
    assert any(not torch.equal(second[name], third[name]) for name in second)
    assert first.keys() == third.keys()
    card = (tmp_path / "two" / "README.md").read_text()
    assert "went on from another head, whose card is `start.md`" in card
    assert (tmp_path / "two" / "start.md").read_text() == kept


def test_a_head_of_another_kind_does_not_go_on(target_folder, work, medusa, tmp_path, capsys):  # noqa: F811
    with pytest.raises(SystemExit) as end:
        run(target_folder, tmp_path, "--only", "train", "--teacher", str(work / "samples"), "--out",
            str(tmp_path / "x"), "--steps", "1", "--start", str(medusa))
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "of kind medusa" in error and "--kind eagle" in error


def test_medusa2_refuses_a_head_of_another_kind(target_folder, work, tmp_path, capsys):  # noqa: F811
    assert run(target_folder, work, "--only", "train", "--steps", "1", "--out", str(tmp_path / "head"), "--option",
               *SMALL["eagle"], "--results", str(tmp_path), "--work", str(tmp_path), "--teacher",
               str(work / "samples")) == 0
    with pytest.raises(SystemExit):
        joint(target_folder, work, tmp_path / "head", tmp_path / "two", "--steps", "1")
    assert "a head of kind eagle" in capsys.readouterr().err


def test_what_is_given_now_counts_when_a_run_goes_on(target_folder, work, tmp_path, monkeypatch, capsys):  # noqa: F811
    rates, step = [], trainHeads.train_step

    def looked_at(head, optims, *rest):
        out = step(head, optims, *rest)
        rates.append([group["lr"] for optim in optims for group in optim.param_groups])
        return out

    monkeypatch.setattr(trainHeads, "train_step", looked_at)
    monkeypatch.setattr(trainHeads, "DECAY", 1e-9)
    monkeypatch.setattr(trainHeads, "WARMUP_STEPS", 1)
    flags = ["--only", "train", "--teacher", str(work / "samples"), "--option", *SMALL["eagle"], "--results",
             str(tmp_path), "--out", str(tmp_path / "head")]
    assert run(target_folder, tmp_path, *flags, "--steps", "2", "--lr", "1e-2") == 0
    assert run(target_folder, tmp_path, *flags, "--steps", "3", "--lr", "1e-4") == 0
    assert rates == [[1e-2] * 2, [1e-2] * 2, [1e-4] * 2]
    capsys.readouterr()
    assert run(target_folder, tmp_path, *flags, "--steps", "3") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "nothing is left" in line]
    assert len(said) == 1 and "--minutes" in said[0] and "--steps" in said[0] and len(rates) == 3


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(target_folder, work, tmp_path,  # noqa: F811
                                                                   monkeypatch, capsys):
    flags = ["--only", "train", "--teacher", str(work / "samples"), "--option", *SMALL["eagle"], "--results",
             str(tmp_path), "--out", str(tmp_path / "head"), "--save-seconds", "0"]
    loss = trainHeads.KINDS["eagle"].loss
    count = []

    def broken(self, batch, **weights):
        count.append(1)
        total, parts = loss(self, batch, **weights)
        return (total * float("nan") if len(count) == 3 else total), parts

    monkeypatch.setattr(trainHeads.KINDS["eagle"], "loss", broken)
    with pytest.raises(SystemExit) as end:
        run(target_folder, tmp_path, *flags, "--steps", "5")
    assert end.value.code == 2 and "--lr" in capsys.readouterr().err.splitlines()[-1]
    saved = torch.load(tmp_path / "eagle.pt", weights_only=True)
    assert saved["step"] == 2 and all(w.isfinite().all() for w in saved["model"].values() if w.is_floating_point())
    assert not (tmp_path / "head").exists()


# ---------------------------------------------------------------------------------------------------- shards


def copy_shards(source, folder, stems):
    """Both files of each shard, under new stems: {new: old}."""
    folder.mkdir(exist_ok=True)
    for new, old in stems.items():
        for suffix in (".npy", ".npz"):
            (folder / f"{new}{suffix}").write_bytes((source / f"{old}{suffix}").read_bytes())


def stems_of(work, which="*"):
    return sorted(path.stem for path in (work / "samples").glob(f"{which}.npz"))


def named(aside, n, prefix="sample-9"):
    """n names of shards, all of them put aside or none."""
    names = (f"{prefix}-{i:05d}" for i in range(10_000))
    return [name for name in names if (zlib.crc32(name.encode()) % trainHeads.ASIDE == 0) == aside][:n]


def test_evaluating_a_head_with_too_small_a_limit_is_told(target_folder, work, tmp_path, capsys):  # noqa: F811
    """It once ended in an IndexError."""
    held = ["--held-out", str(target_folder / "held.txt")]
    assert run(target_folder, work, "--only", "train", "--out", str(tmp_path / "head"), "--steps", "1",
               "--context", "16", "--option", "inner=48", "heads=2", "limit=40", "--results", str(tmp_path)) == 0
    with pytest.raises(SystemExit) as stop:
        run(target_folder, work, "--evaluate", str(tmp_path / "head"), *held, "--held-prompt-tokens", "30",
            "--held-new", "40")
    assert stop.value.code == 2 and "70 tokens does not fit the head's --option limit=40" in capsys.readouterr().err


def test_shards_that_arrive_are_taken_in_as_a_later_run_finds_them(target_folder, work, tmp_path,  # noqa: F811
                                                                   monkeypatch):
    a, b, *_ = stems_of(work)
    late, *early = named(False, 3)
    copy_shards(work / "samples", tmp_path / "samples", {early[0]: a, early[1]: b, named(True, 1)[0]: a})
    shards = trainHeads.HeadShards(tmp_path / "samples")
    step, seen = trainHeads.train_step, []

    def arriving(*args):
        seen.append(list(args[2].loaded))
        if args[4] == 1:
            copy_shards(work / "samples", tmp_path / "samples", {late: b, named(True, 2)[1]: b})
        return step(*args)

    monkeypatch.setattr(trainHeads, "train_step", arriving)
    args = trainHeads.parse(arguments(target_folder, tmp_path, "--steps", "4", "--save-seconds", "0", "--out", "x"))
    args.options, args.weights = {"inner": 48, "heads": 2, "limit": 512}, {}
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    with pytest.raises(ValueError, match="513 tokens does not fit .* limit=512: .*--held-chat"):
        trainHeads.make_head(args, target, shards, [{"ids": [0] * 513}])  # a question that is longer than all others
    trainHeads.train(args, trainHeads.make_head(args, target, shards), shards, tmp_path / "eagle.pt")
    assert [len(loaded) for loaded in seen] == [2, 2, 3, 3]
    assert list(shards.found) == sorted(shards.found) and len(shards.aside) == 2 and len(shards.weights) == 3
    again = trainHeads.HeadShards(tmp_path / "samples")
    batches = [trainHeads.teacher_batch(s, args, np.random.default_rng(5)) for s in (shards, again)]
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
    assert all(np.array_equal(x["ids"], y["ids"]) for x, y in zip(shards.loaded, again.loaded))


def test_what_is_put_aside_is_greedy_and_not_trained_on(work, tmp_path):
    sample, score = stems_of(work, "sample-*")[0], stems_of(work, "score-*")[0]
    plain, aside = named(False, 3), named(True, 2)
    copy_shards(work / "samples", tmp_path, {plain[0]: sample, aside[0]: sample, aside[1]: score})
    shards = trainHeads.HeadShards(tmp_path)
    rows, said = shards.rows_aside()
    assert all((shard["temperature"][at] == 0).all() for shard, at in rows)
    assert 0 < sum(len(at) for _, at in rows) < sum(len(shard["length"]) for shard, _ in rows)
    assert said == "greedy text that was not trained on" and len(shards.loaded) == 1
    args = trainHeads.parse(["--target", "x", "--batch-rows", "2"])
    assert sum(len(batch["ids"]) for batch in trainHeads.batches_aside(rows, args)) == sum(len(at) for _, at in rows)


def test_without_greedy_text_aside_other_text_is_taken_and_named(work, tmp_path):
    sample, score = stems_of(work, "sample-*")[0], stems_of(work, "score-*")[0]
    copy_shards(work / "samples", tmp_path, {named(False, 1)[0]: sample, named(True, 1)[0]: score})
    rows, said = trainHeads.HeadShards(tmp_path).rows_aside()
    assert "not greedy" in said and sum(len(at) for _, at in rows) == len(rows[0][0]["length"])


def test_if_no_name_is_put_aside_the_last_shard_is(work, tmp_path):
    a, b, *_ = stems_of(work)
    names = named(False, 2)
    copy_shards(work / "samples", tmp_path, {names[0]: a})
    alone = trainHeads.HeadShards(tmp_path)
    assert alone.loaded == alone.aside and "but one shard" in alone.rows_aside()[1]
    copy_shards(work / "samples", tmp_path, {names[1]: b})
    alone.refresh()
    for shards in (alone, trainHeads.HeadShards(tmp_path)):
        assert [s["ids"].tolist() for s in shards.aside] == [np.load(tmp_path / f"{names[1]}.npz")["ids"].tolist()]
        assert len(shards.loaded) == 1 and "not trained on" in shards.rows_aside()[1]


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
@pytest.mark.parametrize("rest", [0, 100, 0.5])
def test_a_damaged_shard_is_named(work, tmp_path, suffix, rest):
    copy_shards(work / "samples", tmp_path, {"a": stems_of(work)[0], "b": stems_of(work)[1]})
    path = tmp_path / f"b{suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole[: rest if isinstance(rest, int) else int(rest * len(whole))])
    with pytest.raises(ValueError, match=rf"b\{suffix} is damaged"):
        trainHeads.HeadShards(tmp_path)


def test_features_of_another_shard_and_shards_without_are_refused(work, tmp_path):
    a, b = stems_of(work, "sample-*")[0], stems_of(work, "score-*")[0]
    copy_shards(work / "samples", tmp_path, {"a": a})
    (tmp_path / "a.npy").write_bytes((work / "samples" / f"{b}.npy").read_bytes())
    with pytest.raises(ValueError, match="a.npy is not of its shard"):
        trainHeads.HeadShards(tmp_path)
    (tmp_path / "a.npy").unlink()
    with pytest.raises(ValueError, match=rf"no shard with features in .*{tmp_path.name}: --only features adds them"):
        trainHeads.HeadShards(tmp_path)


# ---------------------------------------------------------------------------------------------------- the card


def test_a_card_names_the_commands_of_its_head_alone(tmp_path):
    lines = ["python trainDraft.py --target t --only sample --seed 1  # stopped by hand",
             "python trainHeads.py --target t --only features --kind mtp",
             "python trainHeads.py --target t --only train --out a",  # of the default kind
             "python trainHeads.py --target t --kind=mtp --only train --out b",
             "python trainHeads.py --target t --text x --kind medusa --steps 2",
             "python trainHeads.py --target t --only train --out 'c --kind mtp'",
             "python trainHeads.py --target t --only train --kind medusa --joint d --held-out e"]
    (tmp_path / "commands.txt").write_text("\n".join(lines) + "\n")
    expect = {("eagle", None): [0, 1, 2, 5], ("mtp", None): [0, 1, 3], ("medusa", None): [0, 1, 4],
              ("medusa", "d"): [0, 1, 4, 6]}
    for (kind, folder), numbers in expect.items():
        args = trainHeads.parse(["--target", "t", "--kind", kind, "--teacher", str(tmp_path),
                                 *(["--joint", folder] if folder else [])])
        assert list(trainHeads.commands_for(args, tmp_path / "work")) == [lines[i] for i in numbers]


def test_a_command_without_target_or_shards_is_not_noted(target_folder, tmp_path):  # noqa: F811
    train, sample = ["--only", "train", "--steps", "1", "--out", "x"], ["--only", "sample", "--target", "no-such-model"]
    for flags in (train, sample):
        with pytest.raises(SystemExit):
            run(target_folder, tmp_path / "work", "--results", str(tmp_path), *flags)
    assert not list(tmp_path.rglob("commands.txt"))


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("flags, said", [
    (["--only", "train", "--steps", "2"], "--out"),
    (["--only", "train", "--out", "x"], "--steps"),
    (["--only", "train", "--out", "x", "--steps", "2", "--kind", "eagle", "--option", "colour=3"], "--option"),
    (["--only", "train", "--out", "x", "--steps", "2", "--option", "heads=three"], "--option"),
    (["--only", "train", "--out", "x", "--steps", "2", "--loss", "colour=3"], "--loss"),
    *((["--only", "train", "--out", "x", "--steps", "2", "--loss", bad], f"--loss {bad.partition('=')[0]}")
      for bad in ("steps=three", "steps=0", "steps=2.5", "steps", "steps=true", 'steps="2"', "decay=-1", "decay=NaN")),
    *((["--only", "train", "--out", "x", "--steps", "2", "--kind", "medusa", "--loss", bad], f"--loss {bad[:4]}")
      for bad in ("colour=3", "steps=2", "lambda_0=0.1", "decay=much", "kl_weight=-1")),
    (["--only", "train", "--out", "x", "--steps", "2", "--kind", "medusa", "--joint", "y", "--held-out", __file__,
      "--loss", "colour=1"], "there are lambda_0, decay, kl_weight, ce_weight"),
    *((["--only", "train", "--out", "x", "--steps", "2", "--kind", kind, "--option", bad], f"--option {bad[:4]}")
      for kind, bad in (("eagle", "heads=0"), ("eagle", "heads=-3"), ("eagle", "inner=-1"), ("eagle", "heads=5"),
                        ("eagle", "inner=1.5"), ("eagle", "copying=1"), ("eagle", "kept=3"), ("eagle", "hidden=3"),
                        ("mtp", "modules=0"), ("mtp", "norms=no"), ("medusa", "heads=0"), ("medusa", "heads=-3"),
                        ("medusa", "tree=[[0]]"), ("medusa", "own_output=3"), ("eagle", "inner=-1"))),
    (["--only", "train", "--out", "x", "--steps", "2", "--option", "heads=2", "limit=16"], "--option limit"),
    (["--only", "train", "--out", "x", "--steps", "2", "--text", "nowhere.txt"], "nowhere.txt"),
    (["--only", "train", "--out", "x", "--steps", "2", "--teacher", "nowhere"], "nowhere"),
    (["--evaluate", "x"], "--held-out"),
    (["--only", "train", "--out", "x", "--steps", "2", "--joint", "y"], "--joint"),
    (["--only", "train", "--out", "x", "--steps", "2", "--depths", "0"], "--depths"),
    (["--only", "train", "--out", "x", "--steps", "2", "--vocab", "-1"], "--vocab"),
    (["--kind", "hydra"], "hydra"),
    (["--only", "train", "--out", "x", "--steps", "2", "--start", "y", "--option", "heads=2"], "--option"),
    (["--only", "train", "--out", "x", "--steps", "2", "--start", "nowhere"], "nowhere"),
])
def test_bad_input_is_one_line_and_status_2(target_folder, work, tmp_path, monkeypatch, capsys, flags,  # noqa: F811
                                            said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        run(target_folder, work, *flags)
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and lines[-1].startswith("trainHeads.py: ") and said in lines[-1]


def test_a_head_of_another_target_is_refused(target_folder, work, tmp_path, capsys):  # noqa: F811
    assert run(target_folder, work, "--only", "train", "--steps", "1", "--out", str(tmp_path / "head"), "--option",
               *SMALL["eagle"]) == 0
    other = tmp_path / "other"
    other.mkdir()
    for file in target_folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    model.get_input_embeddings().weight.data.mul_(2)
    model.save_pretrained(other)
    with pytest.raises(SystemExit):
        run(other, work, "--evaluate", str(tmp_path / "head"), "--held-out", str(target_folder / "held.txt"))
    assert "trained for" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- what is shipped


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_heads_are_whole_and_small(folder):
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"models/{folder.name} is not there")
    config, state = read_config(folder), state_of(folder)
    assert config["target"] == "SmolLM2-135M-Instruct" and (config["hidden"], config["vocab"]) == (576, 49152)
    assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())
    assert not any(name.startswith("out.") for name in state)
    card = (folder / "README.md").read_text()
    assert "Agreement with the target" in card and f"--kind {config['kind']}" in card


def test_shipped_heads_are_under_30_mb_together():
    folders = [folder for folder in SHIPPED if folder.exists()]
    if not folders:
        pytest.skip("no shipped head")
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) < 30e6
