"""The plan of a run against the model that the run builds, and a plan of what no machine here could hold."""

import json

import pytest
import torch

from hf_slt.errors import SLTError
from hf_slt.tickets.format import read_header
from hf_slt.training.arguments import parse_arguments
from hf_slt.training.plan import TokenizerSizes, plan_run
from hf_slt.training.run import build_model

SMALL = "--n_layer 2 --n_embd 32 --n_head 2 --vocab_size 300 --block_size 16 --per_device_train_batch_size 4".split()


@pytest.mark.parametrize(
    "options",
    [
        ["--rule", "edge_popup"],
        ["--rule", "signed", "--scales", "row", "--layer_norm", "trained", "--scale_bits", "8"],
        ["--embedding", "trained", "--search", "0.25"],
        ["--control", "dense"],
    ],
    ids=lambda words: words[1],
)
def test_a_plan_is_what_the_model_is(options, tmp_path):
    arguments = parse_arguments([*SMALL, "--max_steps", "7", *options])
    plan = plan_run(arguments, 2)
    model = build_model(arguments, TokenizerSizes(300))
    learned = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert plan.memory["learned numbers"] == plan.memory["gradients"] == 4 * learned
    assert plan.memory["drawn weights"] == sum(one.nbytes for one in model.buffers())
    assert (plan.steps, plan.tokens_per_step) == (7, 2 * 4 * 16)
    halves = plan_run(arguments, 2, sharded=True)
    assert halves.memory["optimizer"] == plan.memory["optimizer"] // 2 == 4 * learned
    if "dense" not in options:
        model.save_ticket(tmp_path)
        file = tmp_path / "mask.safetensors"
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        # Each tensor of codes fills whole bytes, and scales have a scale of their own.
        slack = 8 * len(read_header(file).tensors)
        assert 0 <= file.stat().st_size - header - plan.ticket_bytes <= slack
        assert plan.weights == sum(one.size for one in read_header(file).tensors.values())


def test_what_no_machine_holds_is_planned_without_allocating_it(tmp_path):
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "intermediate_size": 5504,
    }
    (tmp_path / "llama.json").write_text(json.dumps(sizes))
    words = [
        "--architecture",
        "llama",
        "--base_config",
        str(tmp_path / "llama.json"),
        "--vocab_size",
        "32000",
    ]
    plan = plan_run(parse_arguments([*words, "--rule", "edge_popup", "--bf16"]), 8, sharded=True)
    assert 1.3e9 < plan.searched < 1.4e9
    assert plan.ticket_bytes == pytest.approx(plan.searched / 8, rel=0.01)  # one bit per weight
    assert plan.total < 80e9
    assert "SupermaskLlamaForCausalLM" in plan.table()
    assert torch.get_default_device().type != "meta"
    with pytest.raises(SLTError, match="dry_run 0: give the number of processes"):
        plan_run(parse_arguments(SMALL), 0)
