"""Trained rows in few bits: near what they were, the same the second time, and counted."""

import numpy as np
import pytest
from cases import make, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from hf_slt import SupermaskGPT2LMHeadModel, TicketError
from hf_slt.sharing.card import value_bytes
from hf_slt.weights.quantisation import BITS, dequantise, largest_code, quantise

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


def test_what_has_no_scale_is_refused():
    for value in (np.nan, np.inf, 1e8):
        with pytest.raises(ValueError, match=r"finite|too large"):
            quantise(np.full((1, 2), value, np.float32), 4)


@pytest.mark.parametrize("bits", BITS)
def test_values_take_as_many_bytes_as_are_counted(tmp_path, bits):
    header = make(embedding="trained", embedding_bits=bits).save_ticket(tmp_path)
    stored = load_file(tmp_path / "mask.safetensors")
    for name in ("wte", "wpe"):
        found = sum(array.nbytes for key, array in stored.items() if key in (name, f"{name}_scales"))
        assert found == value_bytes(header.tensors[name]) == 64 * 32 * bits // 8 + 64 * 2


def test_values_that_were_never_trained_are_rounded_too(tmp_path):
    ticket = SupermaskGPT2LMHeadModel(tiny_config(embedding="trained", embedding_bits=4, state="ticket"))
    ticket.save_ticket(tmp_path)
    SupermaskGPT2LMHeadModel.from_pretrained(tmp_path)


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
