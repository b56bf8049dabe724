"""The table of model pairs; finding, checking and loading the models of a pair.

A pair is a target and its drafts, smallest first, and the draft heads that were trained for it. Models are
folders in the format of transformers: `models/<last part of the name>`, filled by downloadModel.py, or any
other folder. Weights are read from safetensors only and no code of a model's author is run.
"""
# torch and transformers are imported by the functions that need them: the download scripts read the table
# too, and answer at once instead of after seconds.
import json
import math
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

MODELS = Path(__file__).resolve().parent / "models"
HEADS = ("medusa", "eagle", "mtp")  # kinds of draft heads, which trainHeads.py trains
FREQUENT_FILE = "frequent.npy"  # in a draft's folder: int32 ids, the most frequent first, as trainDraft.py counted them
DRAFT_VOCAB = 8192  # of them are proposed
MANIFEST = "manifest.json"  # written last by downloadModel.py: where a model comes from, and its files' sizes


@dataclass(frozen=True)
class Pair:
    name: str
    target: str
    drafts: tuple[str, ...]  # smallest first: the stages of multi-draft decoding
    draft: str | None        # the one of them that drafts when only one does
    source: str              # "hub", "pip", or "given" on the command line
    heads: dict[str, str] = field(default_factory=dict, hash=False)  # kind -> the model that is this target's head


PAIRS = {pair.name: replace(pair, heads={kind: f"{pair.name}-{kind}" for kind in HEADS}) for pair in (
    Pair("pythia", "EleutherAI/pythia-2.8b", ("EleutherAI/pythia-70m", "EleutherAI/pythia-410m"),
         "EleutherAI/pythia-70m", "hub"),
    Pair("pythia-12b", "EleutherAI/pythia-12b", ("EleutherAI/pythia-70m",), "EleutherAI/pythia-70m", "hub"),
    Pair("gemma2", "google/gemma-2-9b-it", ("google/gemma-2-2b-it",), "google/gemma-2-2b-it", "hub"),
    Pair("gemma", "google/gemma-7b", ("google/gemma-2b",), "google/gemma-2b", "hub"),
    Pair("mixtral", "mistralai/Mixtral-8x7B-v0.1", ("mistralai/Mistral-7B-v0.1",),
         "mistralai/Mistral-7B-v0.1", "hub"),
    # The last base checkpoint of TinyLlama: the target is a base model too, and it has safetensors.
    Pair("llama2", "meta-llama/Llama-2-13b-hf", ("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",),
         "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", "hub"),
    Pair("smollm2", "SmolLM2-135M-Instruct", ("smollm2-draft-tiny", "smollm2-draft-small"),
         "smollm2-draft-small", "pip"),
)}

# Pythia's sizes: layers, hidden size, heads. All have 50304 rows of vocabulary, and an inner size of 4 x hidden.
PYTHIA = {"70m": (6, 512, 8), "410m": (24, 1024, 16), "1.4b": (24, 2048, 16), "2.8b": (32, 2560, 32)}


def resolve_pair(name="auto", target=None, drafts=None):
    """The Pair of that name, or one of any models: `target`, `drafts` (smallest first) are folders or names.

    "auto" is pythia where CUDA and its files are there, else smollm2. A given target comes with the given
    drafts, or with none, and without heads; given drafts without a target go to the named pair's target and heads.
    With several given drafts the first, the smallest, is the one that drafts alone. ValueError: a name not in the
    table.
    """
    if target is not None or drafts:
        heads = {} if target else resolve_pair(name).heads
        target = target or resolve_pair(name).target
        drafts = tuple(drafts or ())
        label = "+".join(Path(part).name for part in (target, *drafts))
        return Pair(label, target, drafts, drafts[0] if drafts else None, "given", heads)
    if name == "auto":
        import torch
        pythia = PAIRS["pythia"]
        ready = torch.cuda.is_available() and all(map(_is_here, (pythia.target, *pythia.drafts)))
        name = "pythia" if ready else "smollm2"
    if name not in PAIRS:
        raise ValueError(f"no pair '{name}'; --pair takes auto, {', '.join(PAIRS)}, "
                         "or give any two models with --target and --draft")
    return PAIRS[name]


def model_path(name):
    """The folder of a model: an existing folder of that name, else models/<last part of the name>.

    ValueError: it is not there (with the command that brings it), is not whole, or is another model.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = MODELS / Path(name).name
        if not folder.is_dir():
            raise ValueError(f"the model {name} is not here: {_how_to_get(name)}")
        origin = _manifest(folder).get("name", name)
        if "/" in str(name) and origin != name:
            raise ValueError(f"models/{folder.name} holds {origin}, not {name}: move one of them elsewhere "
                             "and give its folder")
    fault = what_is_missing(folder)
    if fault:
        remedy = f"; remove models/{folder.name}, then {_how_to_get(name)}" if folder.parent == MODELS else ""
        raise ValueError(f"the model {name} is not whole: {fault}{remedy}")
    return folder


def head_path(name):
    """The folder of a draft head: models/<name> where there is one and no other folder of that name. Whether a head is
    in it is told by heads.load_head."""
    return MODELS / name if not Path(name).is_dir() and (MODELS / name).is_dir() else Path(name)


def _is_here(name):
    try:
        model_path(name)
    except ValueError:
        return False
    return True


def _how_to_get(name):
    if any(name in pair.drafts for pair in PAIRS.values() if pair.source == "pip"):
        return "it is shipped with the project in models/, or trainDraft.py trains it anew"
    for pair in PAIRS.values():
        if name in (pair.target, *pair.drafts):
            return f"run python downloadModel.py {pair.name}"
    return f"run python downloadModel.py --target {name}, or give an existing folder"


def _manifest(folder):
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict):
        raise ValueError(f"{path} is damaged: remove it")
    return manifest


def what_is_missing(folder):
    """None for a whole model; else what is wrong with the folder, in words.

    Checked are the configuration, that every shard of an index is there, that each safetensors file is as
    long as its own header says, and the sizes in the manifest if there is one (files copied by hand have
    none). Nothing is hashed: this runs at each start.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        return "it has no config.json"
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{index.name} is damaged"
    for name in sorted(names):
        path = folder / name
        if not path.is_file():
            old = " (only .bin weights; this project reads safetensors only)"
            return f"{name} is missing{old if list(folder.glob('*.bin')) else ''}"
        if path.stat().st_size != _safetensors_size(path):
            return f"{name} is cut off or damaged"
    for name, size in _manifest(folder).get("files", {}).items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            return f"{name} is missing or has not the size in {MANIFEST}"
    return None


def _safetensors_size(path):
    """The length in bytes that the header of a safetensors file promises; -1 if it cannot be read."""
    try:
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(min(length, 1 << 28)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError):
        return -1
    return 8 + length + max(ends, default=0)


def pick_device(name="auto"):
    """The torch.device for "auto" (CUDA where there is one), "cuda", "cuda:1" or "cpu"; else ValueError."""
    import torch
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise ValueError(f"no device '{name}'; --device takes auto, cuda or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"the device {name} was asked for but torch finds no such GPU; use --device cpu")
    return device


def pick_dtype(name, device, for_ppl=False):
    """The torch.dtype for "auto", "float32", "bfloat16" or "float16"; ValueError for another name.

    auto on CUDA is float16 for speed and float32 for perplexity, as in the course project (its float16
    perplexities became infinite); on a CPU it is float32.
    """
    import torch
    if name == "auto":
        return torch.float16 if torch.device(device).type == "cuda" and not for_ppl else torch.float32
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"no dtype '{name}'; --dtype takes auto, float32, bfloat16 or float16")
    return getattr(torch, name)


def pick_engine(name, device, dtype):
    """The engine for "auto": packed in float32 on a CPU, graphs on CUDA, else eager; another name is itself."""
    import torch
    if name != "auto":
        return name
    return "graphs" if torch.device(device).type == "cuda" else "packed" if dtype == torch.float32 else "eager"


def load_model(name, device, dtype):
    """The causal LM of that name, in eval mode, without gradients, on `device` (torch.device) in `dtype`.

    One that does not fit into the GPU's free memory is spread by accelerate (device_map="auto") over all
    GPUs and the main memory. ValueError: not here, not whole, or not to be loaded without the author's code.
    """
    import torch
    import transformers
    folder = model_path(name)
    device = torch.device(device)
    placement = device
    if device.type == "cuda":
        # A tenth is left for activations and the KV cache.
        fits = n_parameters(folder) * dtype.itemsize < 0.9 * torch.cuda.mem_get_info(device)[0]
        placement = device if fits else "auto"
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map=placement, use_safetensors=True, trust_remote_code=False,
            local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # RuntimeError: other shapes, no memory
        raise ValueError(f"the model {name} cannot be loaded: {_first_line(error)}") from error
    if report["missing_keys"]:  # transformers would go on with random numbers in their place
        raise ValueError(f"the model {name} has no weights for {sorted(report['missing_keys'])[0]}")
    return model.eval().requires_grad_(False)


def load_draft(name, device, dtype, vocab=DRAFT_VOCAB):
    """load_model of a draft that proposes only its `vocab` most frequent tokens (see engine.CutHead), where its
    folder lists them and has more; 0: all. model.proposes is how many they are.

    ValueError as load_model; or the list is damaged, or shorter.
    """
    import numpy as np
    import torch
    from specSampling import cut_vocabulary
    model, path = load_model(name, device, dtype), model_path(name) / FREQUENT_FILE
    model.proposes = width = model.get_output_embeddings().weight.shape[0]
    if not vocab or not path.is_file() or vocab >= width:
        return model
    try:
        ids = np.load(path, allow_pickle=False)
        whole = ids.ndim == 1 and ids.dtype.kind == "i" and len(np.unique(ids)) == len(ids) > 0
        whole = whole and 0 <= ids.min() and ids.max() < width
    except (ValueError, EOFError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged: trainDraft.py --only vocab writes it anew")
    if len(ids) < vocab:
        raise ValueError(f"the draft {name} lists its {len(ids)} most frequent tokens: --draft-vocab takes no more, "
                         "or 0")
    cut_vocabulary(model, torch.from_numpy(ids[:vocab].astype(np.int64)))
    model.proposes = vocab
    return model


def n_parameters(folder):
    """The number of parameters in the safetensors files of a folder, read from their headers."""
    from safetensors import safe_open
    count = 0
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())
    return count


def pythia_config(size):
    """The configuration of a Pythia model, from PYTHIA. ValueError: no such size."""
    from transformers import GPTNeoXConfig
    if size not in PYTHIA:
        raise ValueError(f"no Pythia of size '{size}': with --shapes pythia, --target and --draft take "
                         f"{', '.join(PYTHIA)}")
    layers, hidden, heads = PYTHIA[size]
    return GPTNeoXConfig(vocab_size=50304, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                         intermediate_size=4 * hidden, max_position_embeddings=2048, rotary_pct=0.25,
                         use_parallel_residual=True, bos_token_id=0, eos_token_id=0)


def pythia_shape(size, device, dtype):
    """A model of that shape with random weights, made on `device` (torch.device) in `dtype`: no file is needed, and
    its passes take as long as the real one's.

    Row i of the head is the embedding of token i - 1, which is large beside what the layers add to it: greedy
    decoding counts upwards, with the best logit far above the next, so that float16's rounding does not change
    the text, as it would with a random head. The global random state is left as it was.
    """
    import torch
    from transformers import AutoModelForCausalLM
    config = pythia_config(size)
    scale = math.sqrt(config.num_hidden_layers)  # about what the layers add up to
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device, torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        embedding = model.get_input_embeddings().weight.normal_(0, scale)
        model.get_output_embeddings().weight.copy_(embedding.roll(1, 0) / (scale * math.sqrt(config.hidden_size)))
    model.config._name_or_path = f"pythia-{size}-random"
    return model.eval().requires_grad_(False)


def load_tokenizer(name):
    """The tokenizer in the folder of that model. ValueError: not here, or it has none that can be read."""
    from transformers import AutoTokenizer
    folder = model_path(name)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exceptions for a damaged file
        raise ValueError(f"the model {name} has no usable tokenizer: {_first_line(error)}") from error


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_pair(target_tokenizer, draft_tokenizer):
    """Raise ValueError with the first differing entry unless an id means the same token to both models.

    All entries are compared, special and added tokens too, so one token more at the end is a difference:
    the draft would be given an id that it was never trained on, or may not have a row for. What is not
    compared is the number of logits: models pad their vocabulary to different widths (Pythia-70m has 50304
    rows and Pythia-12b 50688 for the same 50277 tokens), and the decoders allow for that.
    """
    target = {index: token for token, index in target_tokenizer.get_vocab().items()}
    draft = {index: token for token, index in draft_tokenizer.get_vocab().items()}
    if target == draft:
        return
    first = min(index for index in target.keys() | draft.keys() if target.get(index) != draft.get(index))
    ours, theirs = (repr(vocabulary[first]) if first in vocabulary else "no token"
                    for vocabulary in (target, draft))
    raise ValueError(f"target and draft have different tokenizers: at id {first} the target has {ours}, "
                     f"the draft has {theirs} ({len(target)} and {len(draft)} tokens); "
                     "choose a --draft of the target's family")
