"""Fixtures for all tests: the optional shared material and tiny random models of four families."""
import json
import os
from pathlib import Path

# Set before the hub's client is imported: a test never goes to the network by accident.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import (Gemma2Config, Gemma2ForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM,
                          LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM)

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"

torch.set_num_threads(1)  # the tests' models are so small that threads only cost time


@pytest.fixture(scope="session")
def shared():
    """Path of ../shared/data; the test is skipped, and says so, where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("../shared/data is absent")
    return SHARED


def _shape(vocab, hidden, layers, positions):
    return dict(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
                intermediate_size=2 * hidden, max_position_embeddings=positions,
                bos_token_id=0, eos_token_id=0, pad_token_id=None)


def gpt_neox(vocab=32, hidden=16, layers=2, positions=128, **options):
    config = GPTNeoXConfig(**_shape(vocab, hidden, layers, positions), **options)
    return GPTNeoXForCausalLM(config)


def llama(vocab=32, hidden=16, layers=2, positions=128, **options):
    config = LlamaConfig(**_shape(vocab, hidden, layers, positions), num_key_value_heads=2, **options)
    return LlamaForCausalLM(config)


def mistral(vocab=32, hidden=16, layers=2, positions=128, window=8):
    config = MistralConfig(**_shape(vocab, hidden, layers, positions), num_key_value_heads=2,
                           head_dim=hidden // 4, sliding_window=window)
    return MistralForCausalLM(config)


def gemma2(vocab=32, hidden=16, layers=2, positions=128, window=8):
    """Layers alternate between sliding and full attention; scores and logits are soft-capped."""
    config = Gemma2Config(**_shape(vocab, hidden, layers, positions), num_key_value_heads=2,
                          head_dim=hidden // 4, query_pre_attn_scalar=hidden // 4, sliding_window=window,
                          attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    return Gemma2ForCausalLM(config)


FAMILIES = {"gpt_neox": gpt_neox, "llama": llama, "mistral": mistral, "gemma2": gemma2}


def tiny_model(family, seed=0, sharpness=1.0, **shape):
    """A random model of one of FAMILIES in float32, eval mode, the same for the same arguments.

    `sharpness` multiplies the output embedding's weights: at 1 the laws are nearly flat, at 20 or so
    they are peaked as a trained model's are. The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[family](**shape)
        model.tie_weights()
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(sharpness)
    return model.float().eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_models():
    """The factory: see tiny_model."""
    return tiny_model


def ran(main, few, flags, folder, capsys):
    """(exit status, rows, text, stderr) of a script's main(): `few` make it quick, its results are in `folder`."""
    try:
        code = main([*map(str, (*few, "--out", folder, *flags))])
    except SystemExit as end:
        code = end.code
    rows, text = folder / "results.jsonl", folder / "results.txt"
    return (code, [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else [],
            text.read_text() if text.exists() else "", capsys.readouterr().err)
