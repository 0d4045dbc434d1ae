"""Settings are checked when they are made, and the errors say what to change."""

import pytest

from woq_triton import QuantScheme


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_bits", 3, "num_bits is 3, but must be 4 or 8"),
        ("num_bits", True, "num_bits is True"),
        ("num_bits", 4.0, "num_bits is 4.0"),
        ("group_size", 0, "group_size is 0, but must be a positive integer, or -1"),
        ("group_size", -2, "group_size is -2"),
        ("group_size", 2**31, "group_size is 2147483648"),
        ("group_dim", 2, "group_dim is 2, but must be 1"),
        ("group_dim", False, "group_dim is False"),
        ("symmetric", 1, "symmetric is 1, but must be true or false"),
    ],
)
def test_a_bad_setting_is_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        QuantScheme(**{field: value})


def test_an_unknown_field_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown field 'bits'; the fields are num_bits, group_size"):
        QuantScheme.from_dict({"bits": 4})


def test_a_dictionary_round_trips():
    scheme = QuantScheme(8, 64, 0, True)
    assert QuantScheme.from_dict(scheme.to_dict()) == scheme


@pytest.mark.parametrize(
    ("scheme", "shape", "metadata"),
    [
        (QuantScheme(4, 128, 1), (10, 256), (10, 2)),
        (QuantScheme(4, 128, 1), (10, 300), (10, 3)),
        (QuantScheme(4, 128, 0), (300, 10), (3, 10)),
        (QuantScheme(4, -1, 1), (10, 300), (10, 1)),
        (QuantScheme(4, -1, 0), (300, 10), (1, 10)),
        (QuantScheme(4, 1000, 1), (10, 300), (10, 1)),
        (QuantScheme(4, -1, 1), (10, 0), (10, 0)),
        (QuantScheme(4, 128, 0), (0, 10), (0, 10)),
    ],
)
def test_metadata_has_one_entry_a_group(scheme, shape, metadata):
    assert scheme.metadata_shape(shape) == metadata
