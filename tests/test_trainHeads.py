"""trainHeads.py: features against transformers' hidden states, resuming, what is shipped, what is refused."""
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import trainHeads
from heads import load_head, read_config
from test_trainDraft import ROOT, target_folder  # noqa: F401

SHIPPED = [ROOT / "models" / f"smollm2-{kind}" for kind in trainHeads.KINDS]
SMALL = {"eagle": ["inner=48", "heads=2", "limit=512"], "medusa": ["heads=3"], "mtp": ["inner=48", "heads=2", "limit=512"]}


def arguments(folder, work, *more):
    return ["--target", str(folder), "--work", str(work), "--results", str(work), "--threads", "1", "--no-bf16",
            "--text", str(folder / "text.txt"), "--sample-rows", "8", "--sample-tokens", "1500", "--score-tokens", "600",
            "--batch-rows", "8", "--context", "48", "--vocab", "40", "--top-k", "8", "--held-prompts", "3",
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
    assert everything["method"] == kind and len(everything["agreement"]) == 3
    assert f"{everything['agreement'][0]:.3f}" in card
    if kind == "medusa":
        assert len(head.config["tree"]) == 6 and len(head.config["accuracy"]) == 3
    assert run(target_folder, work, "--evaluate", str(tmp_path / kind), "--held-out", held, "--results", str(tmp_path)) == 0
    again = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()][len(rows):]
    assert [row["agreement"] for row in again] == [row["agreement"] for row in rows]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(target_folder, work, tmp_path):  # noqa: F811
    common = ["--only", "train", "--teacher", str(work / "samples"), "--option", *SMALL["eagle"]]
    for name, stops in (("whole", ["6"]), ("parts", ["3", "6"])):
        for steps in stops:  # the rate decays with the progress: both know of six steps
            trainHeads.DECAY, before = 1e-9, trainHeads.DECAY
            try:
                assert trainHeads.main(arguments(target_folder, tmp_path / name, *common, "--results", str(tmp_path), "--out",
                                                 str(tmp_path / name / "head"), "--steps", steps)) == 0
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
    assert ignorant["a"]["agreement"] == [1, 0, 1] and ignorant["a"]["expected"] == 2


def test_medusa2_trains_the_target_and_reports_its_drift(target_folder, work, tmp_path, capsys):  # noqa: F811
    common = ["--only", "train", "--kind", "medusa", "--option", *SMALL["medusa"], "--held-out",
              str(target_folder / "held.txt"), "--results", str(tmp_path), "--out", str(tmp_path / "medusa")]
    assert run(target_folder, work, *common, "--steps", "3") == 0
    assert run(target_folder, work, *common, "--steps", "3", "--joint", str(tmp_path / "joint"), "--joint-lr", "1e-3") == 0
    said = re.search(r"perplexity on (\d+) held-out tokens is ([\d.]+), and was ([\d.]+)", capsys.readouterr().out)
    assert int(said[1]) == 24 and said[2] != said[3]
    old, new = (AutoModelForCausalLM.from_pretrained(f) for f in (target_folder, tmp_path / "joint"))
    assert not torch.equal(old.model.layers[0].mlp.up_proj.weight, new.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(old.get_input_embeddings().weight, new.get_input_embeddings().weight)
    assert load_head(tmp_path / "joint" / "medusa", new, trainHeads.KINDS).kind == "medusa"


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("flags, said", [
    (["--only", "train", "--steps", "2"], "--out"),
    (["--only", "train", "--out", "x"], "--steps"),
    (["--only", "train", "--out", "x", "--steps", "2", "--kind", "eagle", "--option", "colour=3"], "--option"),
    (["--only", "train", "--out", "x", "--steps", "2", "--option", "heads=three"], "--option"),
    (["--only", "train", "--out", "x", "--steps", "2", "--loss", "colour=3"], "--loss"),
    (["--only", "train", "--out", "x", "--steps", "2", "--loss", "steps=three"], "--loss"),
    (["--only", "train", "--out", "x", "--steps", "2", "--text", "nowhere.txt"], "nowhere.txt"),
    (["--only", "train", "--out", "x", "--steps", "2", "--teacher", "nowhere"], "nowhere"),
    (["--evaluate", "x"], "--held-out"),
    (["--only", "train", "--out", "x", "--steps", "2", "--joint", "y"], "--joint"),
    (["--only", "train", "--out", "x", "--steps", "2", "--depths", "0"], "--depths"),
    (["--only", "train", "--out", "x", "--steps", "2", "--vocab", "-1"], "--vocab"),
    (["--kind", "hydra"], "hydra"),
])
def test_bad_input_is_one_line_and_status_2(target_folder, work, tmp_path, monkeypatch, capsys, flags, said):  # noqa: F811
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
    config, state = read_config(folder), state_of(folder)
    assert config["target"] == "SmolLM2-135M-Instruct" and (config["hidden"], config["vocab"]) == (576, 49152)
    assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())
    assert not any(name.startswith("out.") for name in state)
    card = (folder / "README.md").read_text()
    assert "Agreement with the target" in card and f"--kind {config['kind']}" in card


def test_shipped_heads_are_under_30_mb_together():
    assert sum(file.stat().st_size for folder in SHIPPED for file in folder.iterdir()) < 30e6
