"""DeepSpeed's weight quantization config: which layers get which scheme."""

from collections.abc import Mapping
from typing import Any

from woq_triton.scheme import QuantScheme

FALLBACK = "*"
"""The key for layers that no other key matches."""

Schemes = dict[str, QuantScheme | None]
"""Schemes by key; None leaves the layers of that key alone."""


def parse_config(ds_config: Mapping[str, Any]) -> Schemes:
    """Read ``ds_config["weight_quantization"]["post_init_quant"]``.

    Args:
        ds_config: A DeepSpeed config; its other sections are DeepSpeed's business.

    Returns:
        A scheme for each key, in the config's order; None for a key whose value is null.

    Raises:
        ValueError: The section is missing or empty, or a key's settings are wrong.
    """
    section: Any = ds_config
    path = "ds_config"
    for field in ("weight_quantization", "post_init_quant"):
        section = section.get(field) if isinstance(section, Mapping) else None
        path = f"{path}[{field!r}]"
        if not isinstance(section, Mapping) or not section:
            raise ValueError(
                f"{path} is {section!r}, but must be a dictionary such as "
                "{'weight_quantization': {'post_init_quant': {'*': {'num_bits': 4, 'group_size': 128, "
                "'group_dim': 1, 'symmetric': False}}}}"
            )
    return {str(key): _parse_settings(str(key), settings) for key, settings in section.items()}


def scheme_for(name: str, schemes: Schemes) -> tuple[str, QuantScheme | None] | None:
    """The key that matches a module's name, and its scheme.

    Keys match as substrings of the name; ``'*'`` matches what no other key does.

    Returns:
        ``(key, scheme)``, or None where no key matches.

    Raises:
        ValueError: Two keys with different settings match.
    """
    matches = [key for key in schemes if key != FALLBACK and key in name]
    for key in matches[1:]:
        if schemes[key] != schemes[matches[0]]:
            first, second = (f"{k!r} ({_describe(schemes[k])})" for k in (matches[0], key))
            raise ValueError(
                f"layer {name!r} is matched by keys {first} and {second}; make them exclude each other"
            )
    if matches:
        return matches[0], schemes[matches[0]]
    return (FALLBACK, schemes[FALLBACK]) if FALLBACK in schemes else None


def _parse_settings(key: str, settings: Any) -> QuantScheme | None:
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ValueError(f"post_init_quant[{key!r}] is {settings!r}, but must be a dictionary or null")
    try:
        return QuantScheme.from_dict(settings)
    except ValueError as error:
        raise ValueError(f"post_init_quant[{key!r}]: {error}") from error


def _describe(scheme: QuantScheme | None) -> str:
    return "leave alone" if scheme is None else str(scheme)
