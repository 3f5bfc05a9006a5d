"""Configurations drawn from a seed: saved by transformers, then altered like files from elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hadal.core import model_keys
from hadal.core.model_keys import Use
from tests.drawn import values

CLASS_OF = {
    model_keys.V3: "DeepseekV3",
    model_keys.V32: "DeepseekV32",
    model_keys.GLM: "Glm4MoeLite",
    # Their own code is remote; transformers' DeepseekV3 computes the same.
    model_keys.KIMI: "DeepseekV3",
    model_keys.JOYAI: "DeepseekV3",
}
FAMILIES = tuple(CLASS_OF)
_MOST_WEIGHTS = 9_000_000
_FEATURES = ("plain", "plain", "moved", "moved", "removed", "removed", "alias", "contradiction")
_REFUSALS = (*["fixed"] * 4, "unknown_in_rope", "restated", "restated", "missing")


@dataclass
class Case:
    """One config.json and its allowed results."""

    family: str
    fields: dict[str, Any]
    """Content of the file."""
    seed: int
    """Seed of the weights."""
    must_refuse: set[str] = field(default_factory=set)
    """Keys; the refusal must name one of them. Empty: transformers computes the file."""
    may_refuse: set[str] = field(default_factory=set)
    """Keys that a refusal may name instead of agreeing, as the file has two values for one thing."""


def draw(rng: random.Random, family: str, share_refused: float = 0.13) -> Case:
    """Return a drawn case that transformers can compute or that must be refused."""
    while True:
        case = Case(family, _saved(rng, family), rng.randrange(1 << 31))
        _draw_inert(rng, case)
        has_quantization = rng.random() < 0.25
        if has_quantization:
            _draw_quantization(rng, case)
        is_refused = not case.must_refuse and rng.random() < share_refused
        feature = rng.choice(_REFUSALS if is_refused else _FEATURES)
        _ALTER[feature](rng, case)
        if case.must_refuse or is_sound(case):
            # As read from a file: JSON has no tuples, and only string keys.
            case.fields = json.loads(json.dumps(case.fields))
            return case


def draw_wrong(rng: random.Random, family: str, name: str, key: str) -> Case:
    """Return a case with one fault: the FIXED or SAME key of the table `name`, which is a family,
    or an object as in `oracle.read_keys`.
    """
    case = Case(family, _saved(rng, family), rng.randrange(1 << 31))
    if name == "rope":
        case.fields["rope_parameters"][key] = values.FIXED[key]
    elif name in model_keys.CONFIG and model_keys.CONFIG[name][key].use is Use.SAME:
        _restate(case, key)
    elif name in model_keys.CONFIG:
        case.fields[key] = values.FIXED[key]
    else:
        found, parts = _quantization(rng, is_fp8=name == "fp8")
        objects = ("fp8",) if name == "fp8" else _COMPRESSED_PARTS
        _, target, wrong = parts[objects.index(name)]
        target[key] = wrong[key]
        case.fields["quantization_config"] = found
    case.must_refuse |= {key}
    return case


_COMPRESSED_PARTS = ("compressed", "compressed.group", "compressed.weights")


def oracle_config(case: Case) -> Any:
    """Return transformers' configuration of the file. Raises what transformers raises."""
    import transformers

    fields = json.loads(json.dumps(case.fields))
    fields.pop("quantization_config", None)
    # With these two set transformers returns no logits.
    for key in ("model_type", "architectures", "return_dict", "output_attentions"):
        fields.pop(key, None)
    return getattr(transformers, f"{CLASS_OF[case.family]}Config").from_dict(fields)


def is_sound(case: Case) -> bool:
    """Return whether the file describes a valid model with few weights."""
    try:
        config = oracle_config(case)
    except Exception:  # transformers raises errors of many classes.
        return False
    num_experts, num_groups = config.n_routed_experts, config.n_group
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        return False
    if getattr(config, "index_head_dim", None) and (
        config.index_head_dim < config.qk_rope_head_dim
    ):
        return False
    reachable = config.topk_group * (num_experts // num_groups)
    if config.topk_group > num_groups or config.num_experts_per_tok > reachable:
        return False
    width = config.hidden_size
    heads = config.num_attention_heads
    per_layer = 3 * width * (
        (num_experts + config.n_shared_experts) * config.moe_intermediate_size
        + config.intermediate_size
    ) + heads * (width + config.kv_lora_rank) * (config.qk_nope_head_dim + config.v_head_dim)
    total = 2 * config.vocab_size * width + config.num_hidden_layers * per_layer
    return total <= _MOST_WEIGHTS and heads <= 128


def _saved(rng: random.Random, family: str) -> dict[str, Any]:
    """Return the fields of a file that transformers saved for a small drawn configuration."""
    import transformers

    shape = {key: draw_one(rng) for key, draw_one in values.BASE.items()}
    shape["topk_group"] = rng.randint(1, shape["n_group"])
    reachable = shape["topk_group"] * (shape["n_routed_experts"] // shape["n_group"])
    shape["num_experts_per_tok"] = rng.randint(1, min(reachable, 8))
    shape["num_key_value_heads"] = shape["num_attention_heads"]
    num_layers = shape["num_hidden_layers"]
    num_dense = rng.randint(0, num_layers)
    if family == model_keys.GLM:
        shape["mlp_layer_types"] = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    else:
        shape["first_k_dense_replace"] = num_dense
    if family == model_keys.V32:
        shape |= {"index_n_heads": 16, "index_topk": rng.choice((16, 40, 2048))}
        shape["index_head_dim"] = rng.choice((24, 32))
    elif rng.random() < 0.2:
        shape["q_lora_rank"] = None
    if rng.random() < 0.6:
        shape["rope_parameters"] = _yarn(rng)
    else:
        shape["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": rng.choice(values.THETAS),
        }
    config_class = getattr(transformers, f"{CLASS_OF[family]}Config")
    fields: dict[str, Any] = json.loads(config_class(**shape).to_json_string())
    fields.pop("transformers_version", None)
    fields |= {"model_type": family, "architectures": [f"{CLASS_OF[family]}ForCausalLM"]}
    return fields


def _yarn(rng: random.Random) -> dict[str, Any]:
    found = {
        key: draw_one(rng)
        for key, draw_one in values.ROPE.items()
        if key == "factor" or rng.random() < (0.2 if key == "attention_factor" else 0.6)
    }
    return {"rope_type": "yarn", "rope_theta": rng.choice(values.THETAS), **found}


def _draw_inert(rng: random.Random, case: Case) -> None:
    """Add keys that change no token, and a key that the table lacks."""
    table = model_keys.CONFIG[case.family]
    inert = [key for key in values.INERT if key in table and table[key].use is Use.INERT]
    for key in rng.sample(inert, min(len(inert), 12)):
        case.fields[key] = values.INERT[key](rng)
    if {"id2label", "num_labels"} & case.fields.keys():
        case.fields.pop("problem_type", None)
    heads = case.fields["num_attention_heads"]
    # transformers divides one by the other, rounding down: these give 1, too.
    case.fields["num_key_value_heads"] = rng.choice((heads, heads // 2 + 1))
    if rng.random() < 0.3:
        case.fields["hidden_act"] = rng.choice(("silu", "swish"))
    if rng.random() < 0.3:
        case.fields["num_nextn_predict_layers"] = rng.choice((0, 1, 2))
    if case.family == model_keys.JOYAI:
        case.fields["mtp_is_moe"] = rng.choice((True, False))
    if rng.random() < 0.3:
        case.fields[rng.choice(values.UNKNOWN_AT_TOP)] = rng.choice((1, "a", None))
    for key in ("scoring_func", "topk_method", "moe_layer_freq", "partial_rotary_factor"):
        if rng.random() < 0.1:
            case.fields[key] = table[key].default


def _plain(rng: random.Random, case: Case) -> None:
    """Leave the file as transformers saved it."""


def _move(rng: random.Random, case: Case) -> None:
    """Write the rotation as older files do, or in both ways."""
    fields = case.fields
    rope = fields["rope_parameters"]
    where = rng.randrange(6)
    if where in (0, 1):  # transformers 4: theta at the top, YaRN's keys under the older name.
        fields["rope_theta"] = rope.pop("rope_theta")
        is_yarn = rope.get("rope_type") == "yarn"
        fields["rope_scaling"] = fields.pop("rope_parameters") if is_yarn else None
        if is_yarn and where == 1:
            rope["type"] = rope.pop("rope_type")
    elif where == 2:  # Two thetas.
        fields["rope_theta"] = rng.choice(values.THETAS)
    elif where == 3:  # Two objects.
        fields["rope_scaling"] = rng.choice(({}, _yarn(rng), {"rope_theta": 77.0}))
    elif where == 4:
        fields["original_max_position_embeddings"] = rng.choice((16, 32, 64))
    else:  # Two types.
        rope["type"] = rng.choice(("yarn", "default"))
        if rng.random() < 0.5:
            rope.pop("rope_type", None)
            if rope["type"] == "yarn":
                rope.setdefault("factor", 4.0)


def _remove(rng: random.Random, case: Case) -> None:
    """Leave keys out, so that the family's default applies."""
    table, fields = model_keys.CONFIG[case.family], case.fields
    if rng.random() < 0.3:
        for key in rng.sample(sorted(fields["rope_parameters"]), 1):
            if key != "factor":
                del fields["rope_parameters"][key]
        return _note_missing_theta(case)
    removable = [
        key
        for key in fields
        if key in table
        and table[key].default is not model_keys.REQUIRED
        and table[key].use in (Use.USED, Use.FIXED)
        and key != "quantization_config"
    ]
    if case.family == model_keys.V32 and rng.random() < 0.5:
        del fields["mlp_layer_types"]
    for key in rng.sample(removable, rng.randint(1, 3)):
        fields.pop(key, None)
        if key == "num_hidden_layers":
            fields.pop("mlp_layer_types", None)
            fields.pop("layer_types", None)
        if key == "qk_rope_head_dim":
            fields.pop("head_dim", None)
        if key == "num_attention_heads":
            fields.pop("num_key_value_heads", None)
    _note_missing_theta(case)


def _note_missing_theta(case: Case) -> None:
    """Expect a refusal if neither the file nor the family has a theta."""
    row = model_keys.CONFIG[case.family]["rope_theta"]
    rope = case.fields.get("rope_parameters") or {}
    if row.default is model_keys.REQUIRED and "rope_theta" not in {**case.fields, **rope}:
        case.must_refuse |= {"rope_theta"}


def _alias(rng: random.Random, case: Case) -> None:
    """Write a value under another name of its key, alone or in addition."""
    fields, table = case.fields, model_keys.CONFIG[case.family]
    if case.family == model_keys.V32 and rng.random() < 0.3:
        fields |= {"model_type": model_keys.V3, "architectures": ["DeepseekV3ForCausalLM"]}
        return
    aliases = [key for key, row in table.items() if row.use is Use.ALIAS]
    key = rng.choice(aliases)
    if key == "mlp_layer_types":
        fields.pop("first_k_dense_replace", None)
        return
    of = table[key].of
    if of == "num_nextn_predict_layers":
        fields[of] = rng.choice((0, 2))
    fields[key] = fields.get(of, rng.choice((0, 1, 2)))
    if rng.random() < 0.6:
        fields.pop(of, None)


def _contradict(rng: random.Random, case: Case) -> None:
    """Write two values under two names of one key."""
    fields, table = case.fields, model_keys.CONFIG[case.family]
    key, of = rng.choice((("num_local_experts", "n_routed_experts"), ("mlp_layer_types", "")))
    if key == "mlp_layer_types" and case.family == model_keys.V32:
        fields["first_k_dense_replace"] = 1 + fields["first_k_dense_replace"] % 3
        case.may_refuse |= {"first_k_dense_replace"}
    elif table["num_local_experts"].use is Use.ALIAS:
        fields["num_local_experts"] = 2 * fields["n_routed_experts"]
        case.may_refuse |= {"num_local_experts", of}


def _refuse_fixed(rng: random.Random, case: Case) -> None:
    """Give a FIXED key a value that is not served."""
    table = model_keys.CONFIG[case.family]
    if rng.random() < 0.2:
        name = "rope_parameters"
        case.fields[name]["partial_rotary_factor"] = 0.5
        case.must_refuse |= {f"{name}.partial_rotary_factor"}
        return
    fixed = [key for key in values.FIXED if table[key].use is Use.FIXED]
    for key in rng.sample(fixed, rng.choice((1, 8))):
        case.fields[key] = values.FIXED[key]
        case.must_refuse |= {key}


def _refuse_unknown(rng: random.Random, case: Case) -> None:
    name = "rope_parameters" if rng.random() < 0.5 else "rope_scaling"
    if name not in case.fields:
        case.fields[name] = case.fields.pop("rope_parameters")
    key = rng.choice(values.UNKNOWN_IN_ROPE)
    case.fields[name][key] = 1
    case.must_refuse |= {f"{name}.{key}"}


def _refuse_restated(rng: random.Random, case: Case) -> None:
    """Write a restatement that differs."""
    table = model_keys.CONFIG[case.family]
    same = [key for key, row in table.items() if row.use is Use.SAME]
    if not same:
        return _refuse_fixed(rng, case)
    _restate(case, rng.choice(same))


def _restate(case: Case, key: str) -> None:
    """Give a SAME key a value other than that of the key it restates."""
    of = model_keys.CONFIG[case.family][key].of
    num_layers = case.fields["num_hidden_layers"]
    if key == "mlp_layer_types":
        is_dense = case.fields["first_k_dense_replace"] >= num_layers
        case.fields[key] = ["sparse" if is_dense else "dense"] * num_layers
    elif key == "first_k_dense_replace":
        case.fields[key] = case.fields["mlp_layer_types"].count("dense") + 1
    else:
        case.fields[key] = 2 * case.fields[of]
    case.must_refuse |= {key}


def _refuse_missing(rng: random.Random, case: Case) -> None:
    """Leave out a key that has no default."""
    table = model_keys.CONFIG[case.family]
    required = [
        key
        for key, row in table.items()
        if row.default is model_keys.REQUIRED and key in case.fields
    ]
    if required and rng.random() < 0.8:
        key = rng.choice(required)
        del case.fields[key]
        case.must_refuse |= {key}
        return
    case.fields["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 100.0}
    case.must_refuse |= {"rope_parameters.factor"}


_Part = tuple[str, dict[str, Any], dict[str, Any]]
"""Path of an object, the object, and unserved values for some of its keys."""


def _quantization(rng: random.Random, *, is_fp8: bool) -> tuple[dict[str, Any], list[_Part]]:
    """Return a supported quantization_config, and the objects in it."""
    top = "quantization_config"
    found: dict[str, Any]
    if is_fp8:
        found = {"quant_method": "fp8", **_some(rng, values.FP8_ALLOWED)}
        parts: list[_Part] = [(top, found, values.FP8_REFUSED)]
    else:
        weights = {"num_bits": 8, "type": "float", "strategy": "block"}
        weights |= {"block_structure": [128, 128], **_some(rng, values.WEIGHTS_ALLOWED)}
        group = {"weights": weights, **_some(rng, values.GROUP_ALLOWED)}
        found = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            **_some(rng, values.COMPRESSED_ALLOWED),
        }
        inside = f"{top}.config_groups.group_0"
        parts = [
            (top, found, values.COMPRESSED_REFUSED),
            (inside, group, values.GROUP_REFUSED),
            (f"{inside}.weights", weights, values.WEIGHTS_REFUSED),
        ]
    return found, parts


def _draw_quantization(rng: random.Random, case: Case) -> None:
    """Store the matrices in FP8: as DeepSeek does, or as compressed-tensors does."""
    found, parts = _quantization(rng, is_fp8=rng.random() < 0.4)
    case.fields["quantization_config"] = found
    chance = rng.random()
    if chance < 0.15:
        wrong = [
            (path, target, key, value)
            for path, target, all_ in parts
            for key, value in all_.items()
        ]
        for path, target, key, value in rng.sample(wrong, rng.choice((1, 5))):
            target[key] = value
            case.must_refuse |= {f"{path}.{key}"}
    elif chance < 0.2:
        path, target, _ = rng.choice(parts)
        key = rng.choice(values.UNKNOWN_IN_QUANTIZATION)
        target[key] = True
        case.must_refuse |= {f"{path}.{key}"}


def _some(rng: random.Random, draws: dict[str, values.Draw]) -> dict[str, Any]:
    return {key: draw_one(rng) for key, draw_one in draws.items() if rng.random() < 0.5}


_ALTER: dict[str, Callable[[random.Random, Case], None]] = {
    "plain": _plain,
    "moved": _move,
    "removed": _remove,
    "alias": _alias,
    "contradiction": _contradict,
    "fixed": _refuse_fixed,
    "unknown_in_rope": _refuse_unknown,
    "restated": _refuse_restated,
    "missing": _refuse_missing,
}
