"""DeepSeek-V3 for training: differentiable, over concatenated sequences, with transformers'
parameter names.

Every tensor is [T, ...], with T the tokens of all sequences of a step; `bounds` holds the start of each
sequence, and the end of the last. Independent of data, optimisers and files. The equations are those of the
V3 report, 2.1 and 2.2.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.experts import (
    attention_one_further,
    grouped_experts,
    packed_attention,
    rms_norm,
    route,
)

EMBEDDING_STD, HEAD_STD = 0.5, 0.02
"""Standard deviations of the initial embedding and head."""
MAX_LETTERS = 12
"""Maximum number of letters of a word that its initial embedding includes."""


@dataclass(frozen=True)
class Config:
    """Shape of hadal-tiny; the names are those of config.json."""

    vocab_size: int = 2560
    hidden_size: int = 192
    num_hidden_layers: int = 5
    first_k_dense_replace: int = 1
    intermediate_size: int = 640
    moe_intermediate_size: int = 32
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    num_attention_heads: int = 6
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    num_nextn_predict_layers: int = 1
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def as_dict(self) -> dict:
        return asdict(self)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rope_table(config: Config, positions: Tensor) -> Tensor:
    """Return the complex rotations [T, rope/2] of the given positions."""
    dim = config.qk_rope_head_dim
    freqs = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return torch.polar(torch.ones(len(positions), dim // 2), positions.float()[:, None] * freqs)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate interleaved pairs of the last dimension of x [T, H, rope], as DeepSeek's code does."""
    pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[:, None]).flatten(-2)


def _linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


class Attention(nn.Module):
    """Multi-head latent attention, not absorbed: keys and values are expanded from the latent."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c, heads = c, c.num_attention_heads
        self.scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
        self.q_a_proj = _linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = _linear(c.q_lora_rank, heads * (c.qk_nope_head_dim + c.qk_rope_head_dim))
        self.kv_a_proj_with_mqa = _linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = _linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = _linear(heads * c.v_head_dim, c.hidden_size)

    def queries(self, x: Tensor, table: Tensor) -> Tensor:
        c = self.c
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(
            -1, (c.num_attention_heads, -1)
        )
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return torch.cat([q_nope, rotate(q_rope, table)], dim=-1)

    def latents(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values to cache for each token: the normed latent [T, rank] and the rotated
        key [T, 1, rope].
        """
        c = self.c
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1
        )
        return self.kv_a_layernorm(latent), rotate(k_rope[:, None], table)

    def expand(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        c = self.c
        kv = self.kv_b_proj(latent).unflatten(-1, (c.num_attention_heads, -1))
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        return torch.cat([k_nope, k_rope.expand(*k_nope.shape[:-1], -1)], dim=-1), v

    def forward(self, x: Tensor, table: Tensor, bounds: Tensor) -> Tensor:
        q = self.queries(x, table)
        k, v = self.expand(*self.latents(x, table))
        return self.o_proj(packed_attention(q, k, v, bounds, self.scale).flatten(1))

    def one_further(
        self, x: Tensor, table: Tensor, earlier: tuple[Tensor, Tensor], rows: Tensor, bounds: Tensor
    ) -> Tensor:
        """Return attention of a token after each of `rows`: over the `earlier` keys and values up
        to that row, and over its own.
        """
        q, own = self.queries(x, table), self.expand(*self.latents(x, table))
        return self.o_proj(
            attention_one_further(q, own, earlier, rows, bounds, self.scale).flatten(1)
        )


class MLP(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            _linear(dim, width),
            _linear(dim, width),
            _linear(width, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        n, d, f = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(n, 2 * f, d) * d**-0.5)
        self.down_proj = nn.Parameter(torch.randn(n, d, f) * f**-0.5 * 0.5)


class Gate(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(c.n_routed_experts, c.hidden_size) * c.hidden_size**-0.5
        )
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))


class MoE(nn.Module):
    """Routed experts chosen by biased sigmoid scores, and one shared expert. Counts the tokens of
    each expert.
    """

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.experts, self.gate = Experts(c), Gate(c)
        self.shared_experts = MLP(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)
        self.register_buffer("counts", torch.zeros(c.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        scores = F.linear(x, self.gate.weight).sigmoid()
        chosen = route(
            scores + self.gate.e_score_correction_bias,
            c.n_group,
            c.topk_group,
            c.num_experts_per_tok,
        )
        self.counts += torch.bincount(chosen.flatten(), minlength=c.n_routed_experts)
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        routed = grouped_experts(
            x, self.experts.gate_up_proj, self.experts.down_proj, weights, chosen
        )
        return routed + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, c: Config, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = (
            MLP(c.hidden_size, c.intermediate_size) if index < c.first_k_dense_replace else MoE(c)
        )
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, h: Tensor, table: Tensor, bounds: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Return the states after the layer, only of the tokens in `rows` if given."""
        h = h + self.self_attn(self.input_layernorm(h), table, bounds)
        if rows is not None:
            h = h[rows]
        return h + self.mlp(self.post_attention_layernorm(h))


class MTPLayer(Layer):
    """Multi-token-prediction layer: predicts token t+2 from the main model's state of token t and from
    token t+1.

    The state is the one after the main model's last norm, as inference engines pass it.
    """

    def __init__(self, c: Config) -> None:
        super().__init__(c, c.num_hidden_layers)
        self.enorm, self.hnorm = (
            RMSNorm(c.hidden_size, c.rms_norm_eps),
            RMSNorm(c.hidden_size, c.rms_norm_eps),
        )
        self.eh_proj = _linear(2 * c.hidden_size, c.hidden_size)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(c.hidden_size, c.rms_norm_eps)})

    def combine(self, next_embedding: Tensor, h: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.enorm(next_embedding), self.hnorm(h)], dim=-1))

    def entries(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the first application attends over."""
        return self.self_attn.expand(*self.self_attn.latents(self.input_layernorm(x), table))

    def second(
        self, x: Tensor, table: Tensor, earlier: tuple[Tensor, Tensor], rows: Tensor, bounds: Tensor
    ) -> Tensor:
        """Apply the layer once more, to a token after each of `rows`; `earlier` are the keys and
        values of the first application.
        """
        x = x + self.self_attn.one_further(self.input_layernorm(x), table, earlier, rows, bounds)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(
            [Layer(c, i) for i in range(c.num_hidden_layers)] + [MTPLayer(c)]
        )
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


def _marked(own: Tensor, marks: Sequence[Tensor]) -> Tensor:
    """Return `own` plus half of each mark, scaled so that the result is about as long as `own`. All marks
    have equal weight.
    """
    return (own + 0.5 * sum(marks)) / (1 + 0.25 * len(marks)) ** 0.5


class Model(nn.Module):
    """The whole model. `model.layers[-1]` is the MTP layer, as in DeepSeek's checkpoints."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.model = Body(c)
        self.lm_head = _linear(c.hidden_size, c.vocab_size)
        nn.init.normal_(self.model.embed_tokens.weight, std=EMBEDDING_STD)
        nn.init.normal_(self.lm_head.weight, std=HEAD_STD)
        for name, p in self.named_parameters():
            if (p.ndim == 2 and name.endswith("proj.weight")) or "proj_with_mqa" in name:
                nn.init.normal_(
                    p,
                    std=p.shape[1] ** -0.5
                    * (0.5 if "o_proj" in name or "down_proj" in name else 1.0),
                )

    @torch.no_grad()
    def begin_alike(self, spellings: Sequence[tuple[str, bool, bool]]) -> None:
        """Initialise embeddings that encode a token's spelling, and a head that returns the token
        of a given embedding.

        `spellings`: for each token its word, whether it has a space before it, and whether it
        begins with a capital. A layer that learns to copy one token, to spell it, or to write it
        without its space, therefore learns that for all tokens, including rare ones.
        """
        embedding = self.model.embed_tokens.weight
        space, capital = torch.randn(2, embedding.shape[1])
        letters = torch.randn(MAX_LETTERS, 26, embedding.shape[1])
        words: dict[str, Tensor] = {}
        for row, (word, has_space, is_capital) in zip(embedding, spellings, strict=True):
            if word not in words:
                is_spelled = len(word) > 1 and word.isascii() and word.isalpha()
                of_letters = [
                    letters[place, ord(letter) - ord("a")]
                    for place, letter in enumerate(word[:MAX_LETTERS] if is_spelled else "")
                ]
                words[word] = _marked(torch.randn_like(row), of_letters)
            marks = [space] * has_space + [capital] * is_capital
            row.copy_(EMBEDDING_STD * _marked(words[word], marks))
        self.lm_head.weight.copy_(embedding * (HEAD_STD / EMBEDDING_STD))

    @property
    def mtp(self) -> MTPLayer:
        return self.model.layers[-1]

    def hidden(
        self, tokens: Tensor, positions: Tensor, bounds: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Return the states [T, D] after the last norm, or only those of `rows`: the last layer's
        experts then compute and count no other tokens.
        """
        table = rope_table(self.c, positions)
        h = self.model.embed_tokens(tokens)
        *layers, last = self.model.layers[:-1]
        for layer in layers:
            h = layer(h, table, bounds)
        return self.model.norm(last(h, table, bounds, rows))

    def mtp_hidden(
        self, h: Tensor, next_tokens: Tensor, positions: Tensor, bounds: Tensor
    ) -> Tensor:
        """Return the MTP layer's states [T, D], ready for the head, given the next tokens."""
        table = rope_table(self.c, positions)
        x = self.mtp.combine(self.model.embed_tokens(next_tokens), h)
        return self.mtp.shared_head["norm"](self.mtp(x, table, bounds))

    def mtp_second_hidden(
        self,
        h: Tensor,
        next_tokens: Tensor,
        positions: Tensor,
        bounds: Tensor,
        states: Tensor,
        rows: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        """Return the states [R, D] of the MTP layer applied once more after each of the ascending
        `rows` [R], for the third token from there.

        `states` [T, D] are the layer's own states from the first application, to the same `h` and
        `next_tokens`; `tokens` [R] is each row's token after the next, or its draft. This
        application is one position further on. It attends as in serving: over the entries of the
        first application up to its row, and over its own entry. No other token sees that entry,
        because the first application overwrites it once the token is decided. So all rows are
        computed at once.
        """
        earlier_x = self.mtp.combine(self.model.embed_tokens(next_tokens), h)
        earlier = self.mtp.entries(earlier_x, rope_table(self.c, positions))
        x = self.mtp.combine(self.model.embed_tokens(tokens), states[rows])
        table = rope_table(self.c, positions[rows] + 1)
        return self.mtp.shared_head["norm"](self.mtp.second(x, table, earlier, rows, bounds))
