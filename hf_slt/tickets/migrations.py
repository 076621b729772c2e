"""Converts headers and configurations of older versions to the present version.

    version 1    edge-popup only; a density and the number of kept weights in place of counts of codes
    version 2    all rules; the options of hf_slt stand flat in the configuration
    version 3    the options stand in one nested object, `supermask`; one digest covers the whole ticket

Bits of weights and masks are the same in all versions.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..weights.random_weights import GENERATOR

DIGITS = 16  # stored digits of a tensor's digest; the digest of all masks has 64
NESTED = "supermask"  # the object in config.json that holds our options
# The options of version 2, flat in the configuration. Those that version 1 did not have are given with a value.
_RULE_OPTIONS = ("density", "densities", "mask_bits", "threshold", "n_of_m")
_ADDED_IN_2: dict[str, Any] = {
    "frozen_density": None,
    "embedding_rank": None,
    "factors": [0.0, 1.0],
    "search": 1.0,
    "scales": "none",
    "scale_bits": 16,
    "head_bias": False,
}
_OPTIONS = (
    "seed rule law embedding_law embedding_range qk_scale scale_with_width layer_norm embedding embedding_bits "
    "n_qk n_v state weight_generator mask_digest"
).split()


def nested_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with our options in one nested object.

    Args:
        config (`Mapping[str, Any]`):
            A config.json of any version, or the configuration in a header.

    Returns:
        `dict[str, Any]`: a configuration of version 3.

    Example:

    >>> nested_config({"n_embd": 8, "seed": 7, "density": 0.5})["supermask"]["rule_options"]
    {'density': 0.5}
    """
    if NESTED in config:
        return dict(config)
    ours = {*_RULE_OPTIONS, *_ADDED_IN_2, *_OPTIONS}
    options = {**_ADDED_IN_2, "digest": None, **{name: config[name] for name in config if name in ours}}
    rule = {name: options.pop(name) for name in _RULE_OPTIONS if name in options}
    options["rule_options"] = {name: value for name, value in rule.items() if value is not None}
    return {**{name: config[name] for name in config if name not in ours}, NESTED: options}


def from_version_2(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the header of version 2 as one of version 3. The caller computes the digest, which 2 did not have.

    Args:
        facts (`dict[str, Any]`):
            The JSON object of the header.

    Returns:
        `dict[str, Any]`: the new object.

    Raises:
        `ValueError`: if it is not a header of version 2.
    """
    if "digest" in facts:
        raise ValueError("keys ['digest']")
    return {**facts, "config": nested_config(facts["config"]), "digest": "", "format_version": 3}


def from_version_1(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the header of version 1 as one of version 3.

    Facts that are also in the configuration are left out, and the counts of all codes are added.

    Args:
        facts (`dict[str, Any]`):
            The JSON object of the header.

    Returns:
        `dict[str, Any]`: the new object.

    Raises:
        `ValueError`: if it is not a header of version 1.
    """
    config = facts["config"]
    same = {"seed": config["seed"], "rule": config["rule"], "density": config["density"]}
    same |= {"rule": "edge_popup", "generator": GENERATOR, "bit_order": "little"}
    for key, value in same.items():
        if repr(facts[key]) != repr(value):
            raise ValueError(f"{key} {facts[key]!r}, not {value!r}")
    tensors = {}
    for name, one in facts["tensors"].items():
        kept = one["kept"]
        counts = None if kept is None else [math.prod(one["shape"]) - kept, kept]
        short = {key: one[key] and one[key][:DIGITS] for key in ("data_sha256", "weight_sha256")}
        tensors[name] = (
            {key: value for key, value in one.items() if key != "kept"} | short | {"counts": counts}
        )
    return from_version_2({key: one for key, one in facts.items() if key not in same} | {"tensors": tensors})


HEADER_MIGRATIONS: dict[Any, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: from_version_1,
    2: from_version_2,
}
