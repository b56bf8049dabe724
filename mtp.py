"""MTP: multi-token prediction modules as in DeepSeek-V3, one after another or one repeatedly.

DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2. Module k takes the state h of module k - 1 (the first: the target's
hidden state) at token i and the embedding of token i + k, and guesses token i + k + 1:

    x = M_k [RMSNorm(h) ; RMSNorm(embedding)],  h' = Layer_k(x),  law = W RMSNorm(h'),  W the target's output matrix.

What differs from EAGLE-1 is the norms, that laws alone are learnt and no features, and that modules can be several. All
else is eagle.py's: the layer, a module that is applied again to its own states, the tree.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle import TRACE, Concatenated, DecoderLayer, EagleDrafter, EagleHead
from engine import causal_mask
from medusa import MedusaHead


class Normed(Concatenated):
    """The way in of a module: the embedding and the state, each normalised, and one linear layer on both."""

    def __init__(self, d: int):
        super().__init__(d)
        self.norm_e, self.norm_f = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)

    @property
    def norms(self) -> tuple[nn.RMSNorm, nn.RMSNorm]:
        return self.norm_e, self.norm_f

    def forward(self, e: Tensor, f: Tensor) -> Tensor:
        return self.fc(torch.cat((self.norm_e(e), self.norm_f(f)), -1))


class MTPHead(EagleHead):
    """`modules` modules, of which the last is applied again for tokens further on than there are modules.

    norms: False leaves out those of the formula above, the layer's own stay: to show what they bring. With one module
    this is EAGLE-1's head, trained without its loss on features. The other arguments are EagleHead's.
    """

    kind = "mtp"

    def __init__(self, hidden: int, vocab: int, kept: int = 0, inner: int = 1536, heads: int = 9, copying: bool = True,
                 limit: int = 8192, modules: int = 1, norms: bool = True):
        if modules < 1:
            raise ValueError(f"at least one module is needed, got {modules}")
        self.stages = modules
        super().__init__(hidden, vocab, kept, inner, heads, copying, limit, modules=modules, norms=norms)

    def build(self, d, inner, heads, extra):
        norms = self.config["norms"]
        self.enters = nn.ModuleList((Normed if norms else Concatenated)(d) for _ in range(self.stages))
        self.layers = nn.ModuleList(DecoderLayer(d, inner, heads, extra) for _ in range(self.stages))
        self.leave = nn.RMSNorm(d, eps=1e-5) if norms else nn.Identity()

    @property
    def layer(self) -> DecoderLayer:
        return self.layers[0]

    def stage(self, step):
        module = min(step, self.stages - 1)
        return module, self.enters[module], self.layers[module]

    def bind(self, target, ids=None):
        if self.training:  # it is new: see start
            with torch.no_grad():
                features = target.base_model(self.ids[None, :8], use_cache=False).last_hidden_state
            self.size = float(features.square().mean().sqrt())
        return super().bind(target, ids)

    @torch.no_grad()
    def start(self, tied):
        """As EAGLE's, but for the scale: inside, states are `size` times smaller than the target's."""
        super().start(tied)
        if self.config["norms"]:
            for layer in self.layers:
                layer.o.weight /= self.size
            self.leave.weight.fill_(TRACE * self.size)

    def loss(self, batch: dict, steps: int = 3, share: float = 0.5, kl_weight: float = 1.0, ce_weight: float = 0.5
             ) -> tuple[Tensor, dict[str, float]]:
        """The mean of the losses of the steps' laws (equation 25, lambda = 1); of no fewer steps than modules."""
        steps = max(steps, self.stages)
        total, parts = super().loss(batch, steps, 1.0, 0.0, share, kl_weight, ce_weight)
        return total / steps, parts


class MTPDrafter(EagleDrafter):
    """Grows its tree as EAGLE-2 does. Each module has keys and values of its own: of the pairs (state i, token i + 1 +
    m) that module m has been given with tokens that are known, and behind them its steps of the present draft."""

    def refill(self, ids):
        """The states of the pairs decided since, module by module. The later modules' states at the last pairs await
        tokens; therefore all start as many pairs back."""
        modules, end = self.head.stages, ids.shape[0] - 1
        if modules == 1:
            return super().refill(ids)
        start = max(self.length - modules + 1, 0)
        f = self.target.features[start:end].to(self.head.cos.dtype)
        self.length = end
        first = None
        for m in range(min(modules, end - start)):
            n = end - m - start
            mask = known_mask(start, n, m, f)
            f, logits = self.passed(ids[start + 1 + m :], ids[start + m : end], f[:n], start, mask, None, 1, m)
            first = first or (f[-1:], logits)
        return first

    def expand(self, step, tokens, before, f, mask, base):
        module, n = self.head.stage(step)[0], len(tokens)
        if self.head.stages == 1:
            return super().expand(step, tokens, before, f, mask, base)
        start = base + mask.shape[1] - n
        if step == module:
            self.own = start  # where the columns of the module's steps begin
        mask = F.pad(mask, (base, 0))
        mask[:, max(base - module, 0) : self.own] = float("-inf")  # pairs that it does not know, steps of other modules
        return self.passed(tokens, before, f, start, mask, base + step - 1, n, module)


def known_mask(start: int, n: int, module: int, like: Tensor) -> Tensor:
    """[n, start + n]: what pairs from `start` on see in module m: themselves, and those at least m pairs before, as in
    drafting, where the ones between await their tokens."""
    mask, column = causal_mask(start, n, like), torch.arange(start + n, device=like.device)
    row = column[start:, None]
    return mask.masked_fill_((column > row - module) & (column < row), float("-inf"))


HEADS = {kind.kind: kind for kind in (MedusaHead, EagleHead, MTPHead)}  # all kinds by their names
