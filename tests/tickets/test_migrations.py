"""Headers and configurations of older versions; and a room for tickets in which there is no torch."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import logits_of, make, tiny_config
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import hf_slt
from hf_slt import SupermaskGPT2Config, SupermaskGPT2LMHeadModel, TicketError, verify_ticket
from hf_slt.models import configuration
from hf_slt.tickets import format as ticket_format
from hf_slt.tickets import writing
from hf_slt.tickets.backbones import backbone_differences
from hf_slt.tickets.coded_files import inflate
from hf_slt.tickets.format import read_header, read_ticket
from hf_slt.tickets.migrations import HEADER_MIGRATIONS, from_version_1, from_version_2, nested_config

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
VERSION_1 = sorted(DATA.glob("ticket_0_1_0_*/mask.safetensors"))
VERSION_2 = sorted((DATA / "rules").glob("*.safetensors"))


def name_of(path: Path) -> str:
    return path.stem if path.parent.name == "rules" else path.parent.name


def facts_of(path: Path) -> dict:
    with safe_open(path, "np") as file:
        text = file.metadata()["hf_slt"]
    return json.loads(text if text.startswith("{") else inflate(text, 1 << 20))


# -- configurations -------------------------------------------------------------------------------------

FLAT = {"model_type": "supermask_gpt2", "n_embd": 8, "n_head": 2, "seed": 7, "rule": "sign", "density": None}


def test_flat_options_become_one_object():
    before = copy.deepcopy(FLAT)
    found = nested_config(FLAT)
    assert before == FLAT
    assert {key: one for key, one in found.items() if key != "supermask"} == {
        "model_type": "supermask_gpt2",
        "n_embd": 8,
        "n_head": 2,
    }
    ours = found["supermask"]
    assert (ours["seed"], ours["rule"], ours["rule_options"]) == (7, "sign", {})  # a null is no option
    assert nested_config({**FLAT, "density": 0.25})["supermask"]["rule_options"] == {"density": 0.25}


def test_a_nested_configuration_stays():
    config = tiny_config().to_dict()
    assert nested_config(config) == config
    assert nested_config(nested_config(FLAT)) == nested_config(FLAT)


def test_every_option_of_ours_is_known_to_the_migration():
    """Whatever version 2 wrote flat, which is all of today's options, is found again in the nested object."""
    config = json.loads(tiny_config(rule="multicoat", density=None, search=0.5).to_json_string())
    ours = config.pop("supermask")
    rule = ours.pop("rule_options")
    new = ours.pop("digest")  # of version 3
    flat = {**config, **ours, **rule}
    assert nested_config(flat) == {**config, "supermask": {**ours, "digest": new, "rule_options": rule}}
    assert (
        SupermaskGPT2Config.from_dict(flat).to_dict()
        == SupermaskGPT2Config.from_dict(nested_config(flat)).to_dict()
    )


@pytest.mark.parametrize("path", [*VERSION_1, *VERSION_2], ids=name_of)
def test_a_configuration_class_reads_flat_files_as_the_migration_does(path):
    flat = facts_of(path)["config"]
    assert "supermask" not in flat
    nested = nested_config(flat)
    found = SupermaskGPT2Config.from_dict(flat)
    assert found.to_dict() == SupermaskGPT2Config.from_dict(nested).to_dict()
    for name, value in nested["supermask"].items():
        assert found.supermask[name] == value, name
    for name, value in flat.items():
        if value is not None and name not in ("auto_map", "dtype", "architectures"):
            assert getattr(found, name) == value or name in ("id2label", "label2id"), name


# -- headers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", VERSION_2, ids=name_of)
def test_a_header_of_version_2(path):
    facts = facts_of(path)
    before = copy.deepcopy(facts)
    found = from_version_2(facts)
    assert facts == before
    assert found["format_version"] == 3
    assert found["config"] == nested_config(facts["config"])
    for same in ("tensors", "mask_digest", "encoding"):
        assert found[same] == facts[same]
    header = read_header(path)
    assert header.mask_digest == facts["mask_digest"]
    assert header.digest == ticket_format.ticket_digest(header.config, header.tensors, header.mask_digest)


@pytest.mark.parametrize("path", VERSION_1, ids=name_of)
def test_a_header_of_version_1(path):
    facts = facts_of(path)
    before = copy.deepcopy(facts)
    found = from_version_1(facts)
    assert facts == before
    assert found.keys() == set(ticket_format.Header.__dataclass_fields__)
    for name, old in facts["tensors"].items():
        new = found["tensors"][name]
        size = int(np.prod(old["shape"]))
        assert "kept" not in new
        assert new["counts"] == (None if old["kept"] is None else [size - old["kept"], old["kept"]])
        for digest in ("data_sha256", "weight_sha256"):
            assert new[digest] == (old[digest] and old[digest][:16])
        for same in ("shape", "key", "law", "scale"):
            assert new[same] == old[same]
    ticket = read_ticket(path)
    for name, entry in ticket.header.masked().items():
        assert sum(int(byte).bit_count() for byte in ticket.arrays[name]) == entry.counts[1]


def other_seed(facts):
    facts["seed"] += 1


def other_density(facts):
    facts["density"] = 0.25


def other_rule(facts):
    facts["rule"] = facts["config"]["rule"] = "sign"


def other_order(facts):
    facts["bit_order"] = "big"


def other_generator(facts):
    facts["generator"] = "x/9"


@pytest.mark.parametrize("change", [other_seed, other_density, other_rule, other_order, other_generator])
@pytest.mark.parametrize("path", VERSION_1, ids=name_of)
def test_a_header_of_version_1_that_contradicts_itself(path, change):
    facts = facts_of(path)
    change(facts)
    with pytest.raises(ValueError, match="not"):
        from_version_1(facts)


def test_versions_are_all_or_nothing(tmp_path):
    assert set(HEADER_MIGRATIONS) == set(range(1, ticket_format.FORMAT_VERSION))
    for path in (*VERSION_1, *VERSION_2):
        facts = facts_of(path)
        with pytest.raises(ValueError, match="digest"):  # a version that has one is not older
            from_version_2({**facts, "digest": "0" * 64})
        for version in (0, True, "2", None, 2.5):
            with pytest.raises(TicketError, match=r"format_version .* is not a version; download"):
                ticket_format._parse_header(path, {**facts, "format_version": version})
        newer = (
            f"has format version 4; hf_slt {re.escape(hf_slt.__version__)} reads 1 to 3; upgrade hf_slt: pip"
        )
        with pytest.raises(TicketError, match=newer):
            ticket_format._parse_header(path, {**facts, "format_version": 4})
        other = 3 - facts["format_version"]  # the header of one version under the number of the other
        with pytest.raises(TicketError, match="describe no ticket"):
            ticket_format._parse_header(path, {**facts, "format_version": other})
        with pytest.raises(TicketError, match="describe no ticket"):
            ticket_format._parse_header(path, {**facts, "format_version": 3})


@pytest.mark.parametrize("writer", ["save_ticket", "save_pretrained", "rewrite_ticket"])
def test_config_json_names_the_version_that_wrote_it(writer, tmp_path, monkeypatch, caplog):
    """And the mask file does not: one ticket is one sequence of bytes, whichever version writes it."""
    ticket, files = make("ticket"), set()
    for version in ("0.2.0", "9.8.7"):
        for module in (configuration, writing):
            monkeypatch.setattr(module, "__version__", version)
        folder = tmp_path / version
        if writer == "rewrite_ticket":
            writing.rewrite_ticket(VERSION_1[0].parent, folder)
        else:
            getattr(ticket, writer)(folder)
        assert json.loads((folder / "config.json").read_text())["hf_slt_version"] == version
        files |= {path.read_bytes() for path in folder.glob("*.safetensors")}
        verify_ticket(folder)
        assert "hf_slt_version" not in vars(AutoConfig.from_pretrained(folder))
    assert len(files) == 1
    assert not caplog.records


@pytest.mark.parametrize("path", VERSION_1, ids=name_of)
def test_old_and_new_are_of_one_backbone(path, tmp_path):
    again = json.loads(AutoConfig.from_pretrained(path.parent).to_json_string())
    flat = json.loads((path.parent / "config.json").read_text())
    ticket = AutoModelForCausalLM.from_pretrained(path.parent)
    ticket.save_ticket(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    assert "supermask" in new
    assert backbone_differences(flat, new) == backbone_differences(new, again) == []
    assert backbone_differences(flat, {**flat, "seed": 8}) == ["seed 7 and 8"]
    assert backbone_differences(new, {**flat, "n_embd": 8}) == ["n_embd 32 and 8"]


# -- no torch ----------------------------------------------------------------------------------------------

NO_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import importlib, json, pkgutil
import hf_slt.tickets, hf_slt.weights
for room in (hf_slt.tickets, hf_slt.weights):
    for one in pkgutil.iter_modules(room.__path__):
        importlib.import_module(f"{room.__name__}.{one.name}")
from hf_slt.tickets.verify import verify_files
from hf_slt.tickets.writing import rewrite_ticket
*tickets, target = sys.argv[1:]
print(json.dumps([verify_files(one).header.digest for one in tickets]))
rewrite_ticket(tickets[0], target, encoding="entropy")
print(json.dumps(verify_files(target).header.digest))
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_the_room_of_tickets_needs_neither_torch_nor_transformers(tmp_path):
    model = make(scales="row")
    model.save_ticket(tmp_path / "new")
    tickets = [tmp_path / "new", *(path.parent for path in VERSION_1)]
    run = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *map(str, tickets), str(tmp_path / "target")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    digests, rewritten = map(json.loads, run.stdout.splitlines())
    assert digests == [verify_ticket(one).digest for one in tickets]
    assert rewritten == digests[0]
    loaded = SupermaskGPT2LMHeadModel.from_pretrained(tmp_path / "target")
    assert torch.equal(logits_of(loaded), logits_of(model))
