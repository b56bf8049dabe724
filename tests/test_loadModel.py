"""The table of pairs; which folders are whole models; devices, dtypes, loading; pairs that do not fit."""
import json

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import loadModel
from conftest import tiny_model
from loadModel import (MANIFEST, PAIRS, check_pair, head_path, load_model, load_tokenizer, model_path, n_parameters,
                       pick_device, pick_dtype, resolve_pair, what_is_missing)


def word_tokenizer(*words, special=()):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.add_special_tokens({"additional_special_tokens": list(special)})
    return wrapped


@pytest.fixture
def models_folder(tmp_path, monkeypatch):
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setattr(loadModel, "MODELS", folder)
    return folder


@pytest.fixture
def saved(models_folder):
    """models/tiny: a whole model in several shards with a tokenizer."""
    folder = models_folder / "tiny"
    tiny_model("gpt_neox").save_pretrained(folder, max_shard_size="4KB")
    word_tokenizer("a", "b", "c").save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


def test_the_table_has_the_pairs_of_the_readme():
    assert set(PAIRS) == {"pythia", "pythia-12b", "gemma2", "gemma", "mixtral", "llama2", "smollm2"}
    for name, pair in PAIRS.items():
        assert pair.name == name
        assert pair.draft in pair.drafts
        assert pair.source == ("pip" if name == "smollm2" else "hub")
        assert pair.heads == {kind: f"{name}-{kind}" for kind in ("medusa", "eagle", "mtp")}
        assert all(("/" in model) == (pair.source == "hub") for model in (pair.target, *pair.drafts))
    assert PAIRS["pythia"].drafts == ("EleutherAI/pythia-70m", "EleutherAI/pythia-410m")
    assert PAIRS["pythia"].draft == "EleutherAI/pythia-70m"  # 410m only stands between
    assert PAIRS["smollm2"].draft == "smollm2-draft-small"   # and tiny is only stage 0


def test_auto_takes_pythia_only_with_cuda_and_all_its_files(models_folder, monkeypatch):
    assert resolve_pair("auto").name == "smollm2"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_pair("auto").name == "smollm2"
    for name in ("pythia-2.8b", "pythia-70m"):
        tiny_model("gpt_neox").save_pretrained(models_folder / name)
    assert resolve_pair("auto").name == "smollm2"
    tiny_model("gpt_neox").save_pretrained(models_folder / "pythia-410m")
    assert resolve_pair("auto").name == "pythia"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_pair("auto").name == "smollm2"


def test_any_models_make_a_pair():
    pair = resolve_pair("auto", "somebody/big", ["x/tiny", "y/small"])
    assert (pair.name, pair.target, pair.drafts, pair.draft) == (
        "big+tiny+small", "somebody/big", ("x/tiny", "y/small"), "x/tiny")
    assert resolve_pair("pythia", drafts=["x/tiny"]).target == "EleutherAI/pythia-2.8b"
    assert resolve_pair("pythia", drafts=["x/tiny"]).heads == PAIRS["pythia"].heads  # those of its target
    assert pair.heads == {}
    alone = resolve_pair(target="somebody/big")
    assert alone.drafts == () and alone.draft is None
    with pytest.raises(ValueError, match="--pair takes auto, pythia"):
        resolve_pair("phytia")


def test_a_missing_model_names_the_command_that_brings_it(models_folder):
    for name, command in (("EleutherAI/pythia-12b", "downloadModel.py pythia-12b"),
                          ("SmolLM2-135M-Instruct", "downloadModel.py smollm2"),
                          ("smollm2-draft-small", "trainDraft.py"),
                          ("somebody/big", "downloadModel.py --target somebody/big")):
        with pytest.raises(ValueError, match=command):
            model_path(name)


def test_a_model_is_found_by_folder_by_name_and_by_last_part(saved):
    assert model_path(saved) == model_path(str(saved)) == saved
    assert model_path("tiny") == model_path("somebody/tiny") == saved
    (saved / MANIFEST).write_text(json.dumps({"name": "somebody/tiny", "files": {}}))
    assert model_path("tiny") == model_path("somebody/tiny") == saved
    with pytest.raises(ValueError, match="holds somebody/tiny, not another/tiny"):
        model_path("another/tiny")


def test_a_head_is_found_by_folder_and_by_name(models_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert head_path("smollm2-eagle").parts == ("smollm2-eagle",)
    (models_folder / "smollm2-eagle").mkdir()
    assert head_path("smollm2-eagle") == models_folder / "smollm2-eagle"
    (tmp_path / "smollm2-eagle").mkdir()
    assert head_path("smollm2-eagle").parts == ("smollm2-eagle",)


def damage_config(folder):
    (folder / "config.json").unlink()


def damage_shard(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


def damage_tail(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])


def damage_head(folder):
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def damage_empty(folder):
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"")


def damage_by_manifest(folder):
    (folder / MANIFEST).write_text(json.dumps({"name": "tiny", "files": {"tokenizer.json": 10**6}}))


def damage_index_text(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def damage_index(folder):
    (folder / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize("damage, fault", [
    (damage_config, "config.json"), (damage_shard, "is missing"), (damage_tail, "cut off"),
    (damage_head, "cut off"), (damage_empty, "cut off"), (damage_by_manifest, "tokenizer.json"),
    (damage_index_text, "index.json is damaged"), (damage_index, "model.safetensors is missing")])
def test_half_a_model_is_never_taken_for_a_whole_one(saved, damage, fault):
    assert what_is_missing(saved) is None
    damage(saved)
    assert fault in what_is_missing(saved)
    for load in (model_path, load_tokenizer, lambda name: load_model(name, "cpu", torch.float32)):
        with pytest.raises(ValueError, match="not whole"):
            load("tiny")


def test_old_bin_weights_are_refused(saved):
    for path in saved.glob("*.safetensors*"):
        path.unlink()
    (saved / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="safetensors only"):
        load_model("tiny", "cpu", torch.float32)


def test_devices():
    cuda = torch.cuda.is_available()
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if cuda else "cpu")
    for name in ("gpu", "tpu", "mps", ""):
        with pytest.raises(ValueError, match="--device takes"):
            pick_device(name)
    with pytest.raises(ValueError, match="use --device cpu"):
        pick_device("cuda:99" if cuda else "cuda")


def test_dtypes():
    assert pick_dtype("auto", "cpu") == pick_dtype("auto", torch.device("cpu"), for_ppl=True) == torch.float32
    assert pick_dtype("auto", "cuda") == torch.float16
    assert pick_dtype("auto", "cuda:1", for_ppl=True) == torch.float32
    assert pick_dtype("bfloat16", "cpu") == torch.bfloat16
    assert pick_dtype("float16", "cuda", for_ppl=True) == torch.float16  # asked for is asked for
    for name in ("int8", "float64", "load", ""):
        with pytest.raises(ValueError, match="--dtype takes"):
            pick_dtype(name, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loaded_model_is_the_saved_one(saved, dtype):
    original, loaded = tiny_model("gpt_neox"), load_model("tiny", "cpu", dtype)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    for name, tensor in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype)), name
    assert n_parameters(saved) == sum(p.numel() for p in original.parameters())


def test_tied_weights_are_counted_once(models_folder):
    model = tiny_model("gemma2")
    model.save_pretrained(models_folder / "tied")
    assert n_parameters(models_folder / "tied") == sum(p.numel() for p in model.parameters())
    loaded = load_model("tied", "cpu", torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_missing_weights_are_not_replaced_by_random_numbers(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="no weights for .*layers.2"):
        load_model("tiny", "cpu", torch.float32)


def test_weights_of_another_shape_are_one_line(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(ValueError, match="tiny cannot be loaded"):
        load_model("tiny", "cpu", torch.float32)


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_damaged_manifest_is_named(saved, text):
    (saved / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        model_path("tiny")


def test_code_of_the_author_is_not_run(saved):
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "homemade",
               "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.LM"}}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "evil.py").write_text("raise SystemExit('the code of the author was run')")
    with pytest.raises(ValueError) as failure:
        load_model("tiny", "cpu", torch.float32)
    assert "\n" not in str(failure.value)


def test_what_does_not_fit_one_gpu_is_spread(saved, monkeypatch):
    """Without a GPU: the decision is what is tested, not accelerate."""
    asked = []

    def record(folder, device_map, **others):
        asked.append(str(device_map))
        return tiny_model("gpt_neox"), {"missing_keys": set()}

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", record)
    bytes_in_float16 = 2 * n_parameters(saved)
    for free in (bytes_in_float16 // 2, bytes_in_float16, 2 * bytes_in_float16):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
        load_model("tiny", "cuda", torch.float16)
        load_model("tiny", "cuda", torch.float32)
    assert asked == ["auto", "auto", "auto", "auto", "cuda", "auto"]


def test_equal_tokenizers_fit():
    check_pair(word_tokenizer("a", "b", "c"), word_tokenizer("a", "b", "c"))


@pytest.mark.parametrize("draft, said", [
    (word_tokenizer("a", "x", "c"), "at id 1 the target has 'b', the draft has 'x'"),
    (word_tokenizer("a", "b"), "at id 2 the target has 'c', the draft has no token"),
    (word_tokenizer("a", "b", "c", "d"), "at id 3 the target has no token, the draft has 'd'"),
    (word_tokenizer("a", "b", "c", special=["<|end|>"]),
     "at id 3 the target has no token, the draft has '<|end|>'"),
    (word_tokenizer("b", "a", "c"), "at id 0 the target has 'a', the draft has 'b'"),
])
def test_the_first_differing_entry_is_named(draft, said):
    with pytest.raises(ValueError) as failure:
        check_pair(word_tokenizer("a", "b", "c"), draft)
    assert said in str(failure.value)


def test_special_tokens_in_another_order_are_a_difference():
    target, draft = (word_tokenizer("a", special=order) for order in (["<x>", "<y>"], ["<y>", "<x>"]))
    with pytest.raises(ValueError, match="at id 1 the target has '<x>', the draft has '<y>'"):
        check_pair(target, draft)


def test_different_logit_widths_of_one_tokenizer_fit(models_folder):
    """As Pythia-70m and Pythia-12b: the check looks at tokens, the models pad their rows differently."""
    for name, width in (("narrow", 32), ("wide", 48)):
        tiny_model("gpt_neox", vocab=width).save_pretrained(models_folder / name)
        word_tokenizer("a", "b", "c").save_pretrained(models_folder / name)
    check_pair(load_tokenizer("wide"), load_tokenizer("narrow"))


def test_a_model_without_tokenizer_says_so(models_folder):
    tiny_model("llama").save_pretrained(models_folder / "mute")
    with pytest.raises(ValueError, match="mute has no usable tokenizer"):
        load_tokenizer("mute")


def test_a_damaged_tokenizer_says_so(saved):
    path = saved / "tokenizer.json"
    path.write_text(path.read_text()[:-100])
    with pytest.raises(ValueError, match="tiny has no usable tokenizer"):
        load_tokenizer("tiny")


def test_real_tokenizers_of_different_families_are_refused(shared):
    pythia = PreTrainedTokenizerFast(tokenizer_file=str(shared / "pythia" / "20B_tokenizer.json"))
    stories = load_tokenizer(shared / "stories260K")
    assert len(pythia) == 50277
    check_pair(pythia, pythia)
    check_pair(stories, stories)
    with pytest.raises(ValueError, match="at id 0 the target has '<|endoftext|>', the draft has '<unk>'"):
        check_pair(pythia, stories)


def test_a_real_model_loads_and_speaks(shared):
    """The greedy text of the 260K-parameter story model is documented beside it."""
    folder = shared / "stories260K"
    model, tokenizer = load_model(folder, "cpu", torch.float32), load_tokenizer(folder)
    assert n_parameters(folder) == 260032
    ids = torch.tensor([[tokenizer.bos_token_id]])
    ids = model.generate(ids, max_new_tokens=200, do_sample=False)[0]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text.strip().startswith("Once upon a time, there was a little girl named Lily.")
    assert text.strip() in (folder / "stories260K.md").read_text()
