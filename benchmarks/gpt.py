"""A transformer of 124 million parameters, and a batch for it: what the GPU figures of a large model are measured on."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 50304, 768, 12, 12, 1024


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_forward = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns batch x length x width."""
        rows, length, width = x.shape
        qkv = self.to_qkv(self.before_attention(x)).view(rows, length, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(gelu(self.up(self.before_forward(x))))


class Transformer(nn.Module):
    """Predicts the next token; input and output share their embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a batch of `LENGTH + 1` tokens per row, in bfloat16 where that is safe."""
        with torch.autocast("cuda", torch.bfloat16):
            given, wanted = text[:, :-1], text[:, 1:]
            places = torch.arange(given.shape[1], device=text.device)
            x = self.norm(self.blocks(self.tokens(given) + self.places(places)))
            logits = x @ self.tokens.weight.t()
            return cross_entropy(logits.flatten(0, 1), wanted.flatten())


def batch(rows: int, device: str) -> torch.Tensor:
    """Returns random text."""
    return torch.randint(0, VOCABULARY, (rows, LENGTH + 1), device=device)
