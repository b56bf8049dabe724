"""Random tiny transformers whose greedy text does not run into a loop, and cacheless oracles for them."""
import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from conftest import FAMILIES as PLAIN
from conftest import tiny_model


def gpt2(vocab, hidden, layers, positions):
    """Learned positions: one past the context is an error, not a bad guess."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_embd=hidden, n_layer=layers, n_head=4,
                                      n_positions=positions, bos_token_id=0, eos_token_id=0))


FAMILIES = [*PLAIN, "gpt2"]


def lively(family, seed=0, vocab=32, hidden=16, layers=2, positions=160, **shape):
    """A model whose attention and MLP matter as much as the last token: weights of size 1, untied output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "gpt2":
            model = gpt2(vocab, hidden, layers, positions).float().eval().requires_grad_(False)
        else:
            shape.update(vocab=vocab, hidden=hidden, layers=layers, positions=positions)
            model = tiny_model(family, seed, **shape)
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=hidden**-0.5 * 2)
        model.get_input_embeddings().weight.normal_()
    return model


def noisy(model, seed=0, noise=0.05):
    """A copy with noise on its weights: a draft that agrees with the model now and then."""
    twin = copy.deepcopy(model).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for weight in twin.parameters():
        if weight.dim() == 2:
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return twin


@torch.inference_mode()
def cacheless(model, ids):
    """Logits [n, V] after each token of the list `ids`, from one forward without any cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def greedy_text(model, prompt, n):
    """n greedy tokens, each from a forward of the whole sequence without a cache."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(cacheless(model, ids)[-1].argmax()))
    return ids[len(prompt):]


def random_ids(n, vocab=32, seed=0):
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def counting(rows, length, seed=0, vocab=32):
    """Texts that count upwards from anywhere: ids [rows, length]."""
    start = torch.randint(vocab, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return (start + torch.arange(length)) % vocab


@torch.no_grad()
def batch_of(target, ids, top=4, vocab=32):
    """What the loss takes, with the law of a text that `ids` [B, L] leave no doubt of: nearly one-hot."""
    features = target.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    others = (ids[:, 1:, None] + torch.arange(1, top)) % vocab
    logp = torch.tensor([0.97, *[0.03 / (top - 1)] * (top - 1)]).log().expand(*ids[:, 1:].shape, top)
    return dict(ids=ids, features=features, keep=torch.ones_like(ids, dtype=torch.bool),
                top=torch.cat((ids[:, 1:, None], others), -1), logp=logp.half())
