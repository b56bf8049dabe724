"""Train Medusa, EAGLE and MTP heads for any target: features and laws of the target once, then one head after another."""

import argparse
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from loadModel import load_tokenizer
from trainDraft import (SAMPLE_ROWS, TOP_K, Tap, load_sources, load_teacher, note_command, sample_target,
                        save_features, score_texts)

FEATURE_ROWS = 8                                 # rows of a shard that go through the target together


# ---------------------------------------------------------------------------------------------------- data

@torch.inference_mode()
def add_features(model, folder):
    """The target's hidden states for each shard of `folder` that has none yet (scored text, other samples)."""
    missing = [p for p in sorted(folder.glob("*.npz")) if not p.with_suffix(".npy").exists()]
    shards = [np.load(path) for path in missing]
    bar = tqdm(total=sum(int(s["length"].sum()) for s in shards), unit="tok", desc="features of the target")
    for path, shard in zip(missing, shards):
        ids, length = torch.from_numpy(shard["ids"].astype(np.int64)), torch.from_numpy(shard["length"])
        features = torch.zeros(*ids[:, :-1].shape, model.config.hidden_size, dtype=torch.half)
        order = length.argsort()                 # rows of like lengths together
        for rows in order.split(FEATURE_ROWS):
            n = int(length[rows].max()) - 1      # nothing follows the last token
            features[rows, :n] = model.base_model(ids[rows, :n], use_cache=False).last_hidden_state.half()
            bar.update(int(length[rows].sum()))
        save_features(path, features)
    bar.close()


# ---------------------------------------------------------------------------------------------------- main

class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"trainHeads.py: {message}\n")


def parse(argv):
    p = Parser(description=__doc__)
    p.add_argument("--target", required=True, help="folder (or name) of the target")
    p.add_argument("--teacher", type=Path, required=True, help="folder of shards: the target's laws and features")
    p.add_argument("--only", choices=("sample", "score", "features", "train"), help="only this stage")
    p.add_argument("--text", nargs="+", default=[], help="text files, FILE or FILE=WEIGHT in the mix")
    p.add_argument("--prompts", nargs="+", default=[], help="JSON lines of prompts, FILE or FILE=WEIGHT")
    p.add_argument("--samples", nargs="+", default=[], help="the target's samples (ids), FILE or FILE=WEIGHT")
    p.add_argument("--prompt-limit", type=int, default=1800, help="rows of a prompts file not held out")
    p.add_argument("--sample-tokens", type=int, default=1_500_000)
    p.add_argument("--sample-rows", type=int, default=SAMPLE_ROWS)
    p.add_argument("--score-tokens", type=int, default=50_000, help="tokens of each text that are scored")
    p.add_argument("--top-k", type=int, default=TOP_K)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    args = p.parse_args(argv)
    args.command = shlex.join(["python", "trainHeads.py", *argv])
    return args


def main(argv):
    args = parse(argv)
    torch.set_num_threads(args.threads)
    if args.only != "train":
        note_command(args, args.teacher)
        model = load_teacher(args.target, torch.bfloat16)
    if args.only in (None, "sample"):
        tokenizer = load_tokenizer(args.target)
        sample_target(args, model, load_sources(args, tokenizer), args.teacher, Tap(model))
    if args.only in (None, "features"):
        add_features(model, args.teacher)


if __name__ == "__main__":
    main(sys.argv[1:])
