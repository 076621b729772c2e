"""The tiny model and the table of cases that the tests share."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_slt import SupermaskGPT2Config

TINY = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 64,
    "n_positions": 64,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "scale_with_width": True,
    "density": 0.5,
    "seed": 7,
    "bos_token_id": 62,
    "eos_token_id": 62,
    "pad_token_id": 63,
}

# U[-1, 1] without LayerNorm grows by the layer: small embeddings keep the softmax from saturating.
_THEORY = {"law": "uniform", "layer_norm": False, "embedding_law": "normal", "embedding_range": 5e-4}

# law x embedding x LayerNorm x tied x head widths: every value of each, and the pairs that share code.
CASES = {
    "normal": {},
    "normal-untied": {"tie_word_embeddings": False},
    "normal-trained": {"embedding": "trained"},
    "normal-trained-4bit": {"embedding": "trained", "embedding_bits": 4},
    "uniform": {"law": "uniform"},
    "uniform-no_norm": _THEORY,
    "constant-frozen": {"law": "signed_constant", "embedding": "frozen"},
    "constant-frozen-untied": {"law": "signed_constant", "embedding": "frozen", "tie_word_embeddings": False},
    "xavier-trained-untied": {
        "law": "xavier_uniform",
        "embedding": "trained",
        "embedding_bits": 8,
        "tie_word_embeddings": False,
    },
    "xavier-free_heads": {"law": "xavier_uniform", "n_qk": 6, "n_v": 10},
    "theory": _THEORY | {"embedding": "frozen", "n_qk": 5, "n_v": 16},
}


def tiny_config(**changes) -> SupermaskGPT2Config:
    return SupermaskGPT2Config(**(TINY | changes))


def mergeable(changes: dict) -> bool:
    """Whether stock GPT-2 can carry the weights: it has LayerNorm, and heads of n_embd / n_head."""
    return changes.get("layer_norm", True) and not {"n_qk", "n_v"} & set(changes)


every_case = pytest.mark.parametrize("changes", [pytest.param(CASES[name], id=name) for name in CASES])
mergeable_cases = pytest.mark.parametrize(
    "changes", [pytest.param(CASES[name], id=name) for name in CASES if mergeable(CASES[name])]
)


def tiny_batch(rows: int = 3, length: int = 12, seed: int = 0) -> Tensor:
    """Token ids without padding or end."""
    return torch.randint(0, 62, (rows, length), generator=torch.Generator().manual_seed(seed))


def train_a_little(model: PreTrainedModel, steps: int = 3) -> PreTrainedModel:
    """A few large steps, so that no mask is the one of the first scores; comes back in eval mode."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=0.1, weight_decay=0.0)
    model.train()
    for step in range(steps):
        output = model(tiny_batch(seed=step))[0]  # logits, or hidden states of the bare model
        output.float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor | None = None, **options) -> Tensor:
    """What a model says of a batch, in float32."""
    return model(tiny_batch() if ids is None else ids, **options)[0].float()
