"""Draft heads: what Medusa, EAGLE and MTP have in common. A head reads the target's hidden states (features, behind the
final norm) and guesses tokens further on; the target verifies the guesses as a tree.

A head is shipped without the target's matrices: its embedding and its output matrix are the target's own, frozen, and
are taken from the target that it is bound to. The output matrix may be cut to the most frequent tokens: the others are
never proposed, which costs acceptance and no exactness.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import LongTensor, Tensor, nn

from cachedModel import CachedModel
from engine import Int8Linear, PackedLinear, inputs_watched, replace_linears, side_by_side
from specSampling import Drafter, MeasuredSpeed, Proposal
from treeSampling import Tree
from utils import columns_of

ABSENT = -100.0  # log-probability of a token that has no column
LOOKED_AT = 128  # tokens of random text, on which the 8-bit engine looks at the inputs of a head's layers
PROBES = 32  # numbers of each of a few weights, by which a target is known again


class Head(nn.Module):
    """A trained head. A subclass names its kind and has, besides what its drafter needs,

    start(tied): the values before training; tied: whether the target's output matrix is its embedding.
    loss(batch, **weights) -> (loss [], {part: float}). batch: dict of ids [B, L]; features [B, L - 1, d] float32, the
    hidden state that the target had at token i; keep [B, L], whether the prediction of a token counts; top and logp
    [B, L - 1, k], the target's likeliest tokens behind token i with their log-probabilities.
    guesses(ids, features, depths) -> [depths, B, L - 1]: entry [k - 1, b, i] is the likeliest token for i + 1 + k, by
    the features up to i and the tokens up to i + 1 (and, for heads that go on from their own guesses, the true tokens
    between); -1 where there is none.
    look_at(ids [n], features [n, d]): one pass, in which hooks may see the inputs of the linear layers.

    hidden: the target's hidden size d. vocab: its rows of logits. kept: how many ids the head can propose (0: all).
    Every argument of a subclass's constructor is in `config`, which is saved beside the weights.
    """

    kind = ""
    name = ""  # of its folder

    def __init__(self, hidden: int, vocab: int, kept: int = 0, **more):
        super().__init__()
        self.config = {"hidden": hidden, "vocab": vocab, "kept": kept, **more}
        self.register_buffer("ids", torch.arange(kept or vocab))  # [C], the token of each column of the head's logits
        self.register_buffer("embedding", None, persistent=False)  # [V, d], the target's

    def bind(self, target, ids: LongTensor | None = None) -> "Head":
        """Take the embedding and the rows of the output matrix from `target`, a causal LM as it was loaded (before an
        engine replaces its layers). ids: [kept], the tokens that can be proposed, where they are not loaded ones.

        Raises ValueError for a target of another shape.
        """
        weight = target.get_output_embeddings().weight.detach().float()
        embedding = target.get_input_embeddings().weight.detach().float()
        shape = (self.config["vocab"], self.config["hidden"])
        if tuple(weight.shape) != shape or embedding.shape[1] != shape[1]:
            raise ValueError(f"the head is for a target of {shape[0]} tokens and hidden size {shape[1]}, and this one "
                             f"has {weight.shape[0]} and {weight.shape[1]}")
        if ids is not None:
            self.ids = ids.to(self.ids)
        self.embedding = embedding
        self.out = nn.Linear(shape[1], len(self.ids), bias=False, device="meta")
        self.out.weight = nn.Parameter(weight[self.ids], requires_grad=False)
        self.bound()
        return self

    @property
    def column(self) -> LongTensor:
        """[V], of each token its column in the head's logits, or -1."""
        return columns_of(self.ids, self.config["vocab"])

    def bound(self) -> None:
        """What a subclass derives from the target's matrices."""

    def own_state(self) -> dict[str, Tensor]:
        """What the head has learnt: its state without the target's matrices."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("out.")}


def fingerprint(target) -> list[float]:
    """Numbers from all over the body of `target`, a causal LM as it was loaded: other weights have others."""
    weights = [weight.detach() for weight in target.base_model.parameters()]
    numbers = []
    for weight in (weights[0], weights[len(weights) // 2], weights[-2], weights[-1]):
        places = torch.arange(PROBES) * (weight.numel() - 1) // (PROBES - 1)
        numbers += weight.flatten()[places.to(weight.device)].float().tolist()
    return [round(x, 6) for x in numbers]


def save_head(head: Head, folder: Path, target) -> None:
    """Weights in bfloat16 and config.json into `folder`, each file whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: (value.to(torch.bfloat16) if value.is_floating_point() else value.int()).contiguous()
             for name, value in head.own_state().items()}
    save_file(state, folder / "model.partial")
    config = {"kind": head.kind, "target": Path(target.config._name_or_path).name, **head.config,
              "fingerprint": fingerprint(target)}
    (folder / "config.partial").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for partial, name in (("model.partial", "model.safetensors"), ("config.partial", "config.json")):
        (folder / partial).chmod(0o644)
        (folder / partial).replace(folder / name)


def read_config(folder: Path) -> dict:
    """A head's config.json. Raises ValueError: not there, damaged, or no head's."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not {"kind", "target", "hidden", "vocab"} <= set(config) or not isinstance(config["kind"], str):
            raise TypeError
        torch.tensor([*config["fingerprint"]], dtype=torch.float)
    except FileNotFoundError:
        raise ValueError(f"no head in {folder}: trainHeads.py trains one") from None
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is not a head's configuration: train the head anew with trainHeads.py") from None
    return config


def load_head(folder: Path, target, kinds: dict[str, type[Head]]) -> Head:
    """The head in `folder`, bound to `target` (a causal LM as it was loaded). kinds: name -> class.

    Raises ValueError: no head there, of an unknown kind, damaged, or trained for another target.
    """
    config = read_config(folder)
    kind, name, known = config.pop("kind"), config.pop("target"), config.pop("fingerprint")
    if kind not in kinds:
        raise ValueError(f"{folder} holds a head of kind {kind!r}: there are {', '.join(kinds)}")
    here = fingerprint(target)
    # With room for the rounding of another dtype.
    if len(here) != len(known) or not torch.allclose(torch.tensor(here), torch.tensor(known), rtol=0.01, atol=1e-4):
        raise ValueError(f"the head in {folder} was trained for {name}, and the target is "
                         f"{Path(target.config._name_or_path).name}: train one for it with trainHeads.py")
    try:
        head = kinds[kind](**config)
        head.load_state_dict(load_file(Path(folder) / "model.safetensors"))
        if not all(weight.isfinite().all() for weight in head.parameters()):  # greedily, nobody would notice
            raise ValueError("its weights are not all numbers")
    except Exception as error:  # safetensors raises its own kinds
        raise ValueError(f"the head in {folder} cannot be read: {str(error).splitlines()[0]}") from None
    head.name = Path(folder).resolve().name
    return head.float().eval().requires_grad_(False).bind(target)


# -------------------------------------------------------------------------------------------------------- loss


def distillation_loss(logits, labels, top, logp, kl_weight, ce_weight):
    """kl_weight * KL(target || draft) + ce_weight * CE of the target's likeliest token, means over positions.

    logits [P, C]; labels [P] and top [P, k] index its columns; logp [P, k] the target's log-probabilities.
    What the top k leave over is one more class on both sides, so with k = C this is the plain KL. Returns
    (loss, KL, CE of the labels), the last two for the log only.
    """
    logits = logits.float()
    log_z = torch.logsumexp(logits, -1, keepdim=True)
    logq, logp = logits.gather(1, top) - log_z, logp.float()
    p, q = logp.exp(), logq.exp()
    kl = (p * (logp - logq)).sum(1)
    p_rest, q_rest = (1 - p.sum(1)).clamp(min=0), (1 - q.sum(1)).clamp(min=1e-6)
    kl = kl + torch.where(p_rest > 1e-4, p_rest * (p_rest.clamp(min=1e-6).log() - q_rest.log()), 0.0)
    loss = kl_weight * kl.mean() - ce_weight * logq[:, 0].mean()
    label_ce = (log_z - logits.gather(1, labels[:, None])).detach().mean()
    return loss, kl.detach().mean(), label_ce


def law_loss(logits: Tensor, top: LongTensor, logp: Tensor, column: LongTensor, kl_weight: float = 1.0,
             ce_weight: float = 0.5) -> Tensor:
    """distillation_loss [] of a head's logits [P, C] against the target's law over all its tokens: top [P, k] and
    logp [P, k]. column: [V], of each token its column in the logits, or -1; top[:, 0] must have one. What the head
    cannot propose counts as what the top k leave over."""
    columns = column[top]
    logp = logp.float().masked_fill(columns < 0, ABSENT)
    columns = torch.where(columns < 0, logits.shape[1], columns)
    logits = F.pad(logits.float(), (0, 1), value=ABSENT)  # one column for all that have none
    return distillation_loss(logits, columns[:, 0], columns, logp, kl_weight, ce_weight)[0]


# --------------------------------------------------------------------------------------------------- on an engine


def use_head_engine(head: Head, target) -> Head:
    """Let `head` run on the engine of its target (a causal LM), in place. The head is a drafter: its law is whatever it
    proposes from, so 8 bits cost it acceptance at most."""
    engine = getattr(target, "engine", "eager").split()[0]
    if engine == "packed":
        replace_linears(head, lambda layers: PackedLinear(*side_by_side(layers)))
    elif engine == "int8":
        largest = largest_inputs_of(head, target)
        replace_linears(head, lambda layers: Int8Linear(*side_by_side(layers), largest[layers[0]]))
    return head.to(target.device)


@torch.inference_mode()
def largest_inputs_of(head: Head, target) -> dict[nn.Module, Tensor]:
    """The largest |x| of each input channel of the head's linear layers, on the target's features of random ids."""
    model = CachedModel(target)
    model.keep_features()
    tokens = min(LOOKED_AT, model.context_length or LOOKED_AT, head.config.get("limit", LOOKED_AT))
    ids = torch.randint(head.config["vocab"], (tokens,), generator=torch.Generator().manual_seed(0))
    model.forward(ids.to(model.device))
    with inputs_watched(head) as seen:
        head.look_at(ids, model.features.float().cpu())
    return seen


class HeadDrafter(Drafter):
    """Proposes with a head: what the three kinds share. The features of the sequence are the target's own, kept beside
    its cache; of the first round, which reads the prompt, there are none, and nothing is proposed.

    A subclass implements `grow`. head: bound to the target. gamma: how deep the tree may be. measured: where costs are
    known, what the rounds have brought; where drafting has not paid it rests, but for trials.
    """

    def __init__(self, head: Head, gamma=8, measured: MeasuredSpeed | None = None):
        super().__init__(gamma)
        self.head, self.name, self.measured = head, head.kind, measured

    def begin(self, target, params, generator):
        super().begin(target, params, generator)
        self.target = target
        target.keep_features()
        if self.measured:
            self.measured.begin()

    def propose(self, ids, limit):
        self.before, n = self.level.forwards, ids.shape[0]
        depth = min(limit, self.gamma.propose(), self.room(n))
        ready = self.target.length == n - 1 > 0  # the target has seen all but the last token
        if depth < 1 or not ready or self.measured and not self.measured.pays():
            return self.proposal(ids[n:], [])
        return self.grow(ids, depth)

    def grow(self, ids: LongTensor, depth: int) -> Tree | Proposal:
        """The tree behind ids [n], at most `depth` deep; an empty chain if there is none."""
        raise NotImplementedError

    def keep(self, length, round):
        super().keep(length, round)
        if self.measured:
            self.measured.update(round, self.level.forwards - self.before)
