"""Trained rows in few bits: near what they were, the same the second time, and counted."""

import numpy as np
import pytest
import torch
from cases import logits_of, tiny_config, train_a_little
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from hf_slt import SupermaskGPT2LMHeadModel, TicketError, verify_ticket
from hf_slt.model.layers import RoundedWeight
from hf_slt.model.quantisation import BITS, dequantise, largest_code, quantise

tables = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 9)),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=True),
)


@pytest.mark.parametrize("bits", BITS)
@given(values=tables)
def test_within_half_a_step_and_the_same_the_second_time(bits, values):
    codes, scales = quantise(values, bits)
    found = dequantise(codes, scales, values.shape, bits)
    assert (np.abs(found - values) <= scales.astype(np.float64)[:, None] / 2).all()
    step = np.maximum(np.abs(values).max(1) / largest_code(bits), 2**-14)
    assert (scales >= step).all()
    assert (scales <= step * (1 + 2**-9)).all()
    again = quantise(found, bits)
    assert np.array_equal(again[0], codes)
    assert np.array_equal(again[1], scales)


@pytest.mark.parametrize("bits", BITS)
@given(values=tables)
def test_torch_rounds_as_numpy_does(bits, values):
    ours = RoundedWeight.apply(torch.from_numpy(values), bits)
    assert ours.numpy().tobytes() == dequantise(*quantise(values, bits), values.shape, bits).tobytes()


def test_what_has_no_scale_is_refused():
    for value in (np.nan, np.inf, 1e8):
        with pytest.raises(ValueError, match=r"finite|too large"):
            quantise(np.full((1, 2), value, np.float32), 4)


def test_the_gradient_passes_straight_through():
    weight = torch.randn(3, 4, requires_grad=True)
    (RoundedWeight.apply(weight, 4) * torch.arange(12.0).view(3, 4)).sum().backward()
    assert torch.equal(weight.grad, torch.arange(12.0).view(3, 4))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("encoding", ["packed", "entropy"])
def test_a_ticket_of_few_bits_is_the_model_that_was_trained(tmp_path, bits, encoding):
    model = train_a_little(SupermaskGPT2LMHeadModel(tiny_config(embedding="trained", embedding_bits=bits)))
    model.save_ticket(tmp_path / "ticket", encoding=encoding)
    header = verify_ticket(tmp_path / "ticket")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ticket")
    assert torch.equal(logits_of(again), logits_of(model))
    assert torch.equal(logits_of(model.to_ticket()), logits_of(model))
    again.save_ticket(tmp_path / "again", encoding=encoding)
    first, second = ((tmp_path / name / "mask.safetensors").read_bytes() for name in ("ticket", "again"))
    assert first == second
    stored = load_file(tmp_path / "ticket" / "mask.safetensors")
    tables = {name for name in stored if ".wte." in name or ".wpe." in name}
    assert sum(stored[name].nbytes for name in tables) == sum(model.ledger().values())
    assert model.ledger() == {name: header.tensors[name].value_bytes for name in ("wte", "wpe")}
    assert model.ledger()["wte"] == 64 * 32 * bits // 8 + 64 * 2


def test_damaged_codes_are_refused(tmp_path):
    model = SupermaskGPT2LMHeadModel(tiny_config(embedding="trained", embedding_bits=4))
    model.save_ticket(tmp_path)
    data = bytearray((tmp_path / "mask.safetensors").read_bytes())
    data[-40] ^= 1
    (tmp_path / "mask.safetensors").write_bytes(data)
    with pytest.raises(TicketError, match="digest"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_bits_are_for_trained_embeddings():
    with pytest.raises(ValueError, match="embedding='trained'"):
        tiny_config(embedding_bits=4)
    with pytest.raises(ValueError, match="not one of"):
        tiny_config(embedding="trained", embedding_bits=5)
