"""DeepSpeed's config: which key serves which layer, and errors that name the key."""

import pytest

from woq_triton import QuantScheme
from woq_triton.config import parse_config, scheme_for

INT4 = {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}
INT8 = INT4 | {"num_bits": 8}


def config(keys):
    return {"weight_quantization": {"post_init_quant": keys}, "fp16": {"enabled": True}}


def test_settings_are_read_and_other_sections_ignored():
    schemes = parse_config(config({"q_proj": INT8, "*": INT4, "lm_head": None}))
    assert schemes == {"q_proj": QuantScheme(8, 64), "*": QuantScheme(4, 64), "lm_head": None}


def test_keys_match_as_substrings_and_the_star_takes_the_rest():
    schemes = parse_config(config({"*": INT4, "self_attn": INT8, "lm_head": None}))
    assert scheme_for("model.layers.0.self_attn.q_proj", schemes) == ("self_attn", QuantScheme(8, 64))
    assert scheme_for("model.layers.0.mlp.up_proj", schemes) == ("*", QuantScheme(4, 64))
    assert scheme_for("lm_head", schemes) == ("lm_head", None)
    del schemes["*"]
    assert scheme_for("model.layers.0.mlp.up_proj", schemes) is None


def test_two_matching_keys_with_different_settings_are_both_named():
    schemes = parse_config(config({"self_attn": INT8, "q_proj": INT4}))
    with pytest.raises(ValueError, match=r"'self_attn' \(int8 g64.*'q_proj' \(int4 g64"):
        scheme_for("layers.0.self_attn.q_proj", schemes)


def test_two_matching_keys_with_equal_settings_are_fine():
    schemes = parse_config(config({"self_attn": INT8, "q_proj": INT8}))
    assert scheme_for("layers.0.self_attn.q_proj", schemes) == ("self_attn", QuantScheme(8, 64))


def test_leaving_alone_conflicts_with_settings():
    schemes = parse_config(config({"self_attn": None, "q_proj": INT4}))
    with pytest.raises(ValueError, match="leave alone"):
        scheme_for("layers.0.self_attn.q_proj", schemes)


@pytest.mark.parametrize(
    ("ds_config", "message"),
    [
        ({}, r"ds_config\['weight_quantization'\] is None, but must be a dictionary such as"),
        ({"weight_quantization": {}}, r"\['weight_quantization'\] is {}"),
        ({"weight_quantization": {"post_init_quant": []}}, r"\['post_init_quant'\] is \[\]"),
        (config({}), r"\['post_init_quant'\] is {}"),
        (config({"q_proj": 4}), r"post_init_quant\['q_proj'\] is 4, but must be a dictionary or null"),
        (config({"q_proj": {"bits": 4}}), r"post_init_quant\['q_proj'\]: unknown field 'bits'"),
        (config({"q_proj": INT4 | {"num_bits": 3}}), r"post_init_quant\['q_proj'\]: num_bits is 3"),
        (config({"*": INT4 | {"group_size": 0}}), r"post_init_quant\['\*'\]: group_size is 0"),
    ],
)
def test_a_wrong_config_is_explained(ds_config, message):
    with pytest.raises(ValueError, match=message):
        parse_config(ds_config)
