"""The tiny model, the table of cases and the comparisons that the tests share."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import GPT2LMHeadModel, PreTrainedModel

from hf_slt import SupermaskGPT2Config, SupermaskGPT2LMHeadModel
from hf_slt.masks.modules import MaskedModule

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

# With U[-1, 1] and without LayerNorm, values grow with every layer: small embeddings keep the softmax from saturating.
_THEORY = {"law": "uniform", "layer_norm": False, "embedding_law": "normal", "embedding_range": 5e-4}

# law x embedding x LayerNorm x tied x head widths: every value of each, and the pairs that share code.
CASES = {
    "normal": {},
    "normal-untied": {"tie_word_embeddings": False},
    "normal-trained": {"embedding": "trained"},
    "normal-trained-4bit": {"embedding": "trained", "embedding_bits": 4},
    "normal-low_rank": {"embedding": "trained", "embedding_bits": 8, "embedding_rank": 12},
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
    """Return whether stock GPT-2 can hold the weights: it has LayerNorm, and heads of width n_embd / n_head."""
    return changes.get("layer_norm", True) and not {"n_qk", "n_v"} & set(changes)


def these_cases(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("changes", [pytest.param(CASES[name], id=name) for name in names])


every_case = these_cases(*CASES)
mergeable_cases = these_cases(*(name for name in CASES if mergeable(CASES[name])))
both_states = pytest.mark.parametrize("state", ["scores", "ticket"])


def tiny_batch(rows: int = 3, length: int = 12, seed: int = 0) -> Tensor:
    """Return token ids without padding or end token."""
    return torch.randint(0, 62, (rows, length), generator=torch.Generator().manual_seed(seed))


IDS = tiny_batch()


def train_a_little(model: PreTrainedModel, steps: int = 3) -> PreTrainedModel:
    """Take a few large steps, so no mask stays that of the initial scores. Return the model in eval mode."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, weight_decay=0.0)
    model.train()
    for step in range(steps):
        output = model(tiny_batch(seed=step))[0]  # logits, or hidden states of the bare model
        output.float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor | None = None, **options) -> Tensor:
    """Return the output of a model for a batch, in float32."""
    return model(IDS if ids is None else ids, **options)[0].float()


def make(state: str = "scores", model_class=SupermaskGPT2LMHeadModel, **changes) -> PreTrainedModel:
    """Make a tiny model with trained masks: one that learns, or its ticket."""
    model = train_a_little(model_class(tiny_config(**changes)))
    return model if state == "scores" else model.to_ticket()


def learned(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return scores, masks and trained embeddings: everything that a file holds."""
    return {name: values.detach().clone() for name, values in module.state_dict().items()}


def assert_same_values(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        assert torch.equal(found[name], values), name


def assert_equals_stock(found: Tensor, model: PreTrainedModel) -> None:
    """Check that the logits equal those of stock GPT-2 with the merged weights of `model`."""
    stock = model.merge_and_unload()
    assert type(stock) is GPT2LMHeadModel
    assert not [module for module in stock.modules() if isinstance(module, MaskedModule)]
    assert_close(found, logits_of(stock), rtol=1e-5, atol=1e-5)


def gradients(model: PreTrainedModel, **batch: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the loss on a batch, by name of the parameter."""
    model.zero_grad()
    model(**(batch or {"input_ids": IDS, "labels": IDS}), use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def save_tickets(folder: Path, names: Sequence[str], **changes) -> dict[str, Tensor]:
    """Save tickets of one backbone, each trained a little longer than the one before. Return their logits by name."""
    model, logits = SupermaskGPT2LMHeadModel(tiny_config(**changes)), {}
    for name in names:
        train_a_little(model).save_ticket(folder / name)
        logits[name] = logits_of(model)
    return logits
