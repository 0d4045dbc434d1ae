"""Ranks settle what happens to a model before any of them changes it.

A rank that changed its shard while another refused would leave a model that computes nonsense, or
waits for ever in its next all-reduce. So each rank tells the others its verdict, or its error, in one
small collective; all then do the same, or all raise the same error.
"""

from dataclasses import dataclass
from typing import Any

from torch import distributed, nn

from woq_triton import backends
from woq_triton.model import Plan, agree_alone

_RAISED_AS = {kind.__name__: kind for kind in (TypeError, ValueError, RuntimeError)}
_HALF_WAY = " (quantization stopped half-way on every rank: load the model anew)"


@dataclass(frozen=True)
class _Failure:
    kind: str
    text: str


@dataclass(frozen=True)
class _Verdict:
    planned: dict[str, str]  # what happens to each layer that is quantized
    skipped: dict[str, str]  # why each layer that is not is left alone


class Ranks:
    """The processes that share a model's weights.

    Args:
        group: Their process group, or None for a model that one process holds alone.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    @classmethod
    def of(cls, model: nn.Module) -> "Ranks":
        """The processes over which a model's layers communicate."""
        groups: list[Any] = []
        for module in model.modules():
            group = getattr(module, "mp_group", None)
            if group is None or any(group is known for known in groups):
                continue
            if distributed.get_world_size(group) > 1:
                groups.append(group)
        # Ranks that meet in different groups only share a verdict in a group that holds them all.
        return cls(distributed.group.WORLD if len(groups) > 1 else groups[0] if groups else None)

    def settle(self, plan: Plan | None, error: Exception | None) -> Plan:
        """Agree on a plan: a layer left alone on one rank is left alone on all.

        Raises:
            Exception: This rank's error, where it is alone.
            TypeError, ValueError, RuntimeError: The same on every rank, naming the rank that failed.
        """
        if self.group is None:
            return agree_alone(plan, error)
        said = self._exchange(_failure(error) if plan is None else _verdict(plan))
        _raise_first(said, error)
        assert plan is not None
        _compare(said)
        mine = _verdict(plan).planned
        for rank, theirs in said:
            for name, reason in theirs.skipped.items():
                if name in mine:
                    plan.leave_alone(name, f"on rank {rank}, {reason}")
        if mine and not plan.layers:
            first = plan.skipped[0]
            raise ValueError(f"nothing to quantize: {first.name!r} is left alone because {first.reason}")
        return plan

    def confirm(self, error: Exception | None) -> None:
        """Make every rank raise if one of them failed after the plan was settled.

        Raises:
            Exception: This rank's error, where it is alone.
            TypeError, ValueError, RuntimeError: Some rank failed half-way, so no rank's model is usable.
        """
        if self.group is not None:
            _raise_first(self._exchange(None if error is None else _failure(error)), error, _HALF_WAY)
        if error is not None:
            raise error

    def _exchange(self, mine: Any) -> list[tuple[int, Any]]:
        """What each rank says, with its global rank."""
        said: list[Any] = [None] * distributed.get_world_size(self.group)
        distributed.all_gather_object(said, mine, group=self.group)
        return [(distributed.get_global_rank(self.group, index), each) for index, each in enumerate(said)]


def _failure(error: Exception | None) -> _Failure:
    assert error is not None
    kind = next((name for name, known in _RAISED_AS.items() if isinstance(error, known)), "RuntimeError")
    text = str(error) if kind == type(error).__name__ else f"{type(error).__name__}: {error}"
    return _Failure(kind, text)


def _verdict(plan: Plan) -> _Verdict:
    planned = {}
    for layer in plan.layers:
        served_by = backends.name_for(layer.conversion.weight.device.type)
        planned[layer.names[0]] = f"{layer.scheme}, served by {served_by}"
    return _Verdict(planned, {layer.name: layer.reason for layer in plan.skipped})


def _raise_first(said: list[tuple[int, Any]], own: Exception | None, remark: str = "") -> None:
    """Raise the error of the lowest rank that failed, on every rank alike."""
    for rank, each in said:
        if isinstance(each, _Failure):
            raise _RAISED_AS[each.kind](f"rank {rank}: {each.text}{remark}") from own


def _compare(said: list[tuple[int, _Verdict]]) -> None:
    """Refuse ranks that would treat a layer differently; every rank finds the same difference."""
    for name in sorted({name for _, verdict in said for name in verdict.planned}):
        plans = [(rank, verdict.planned.get(name), name in verdict.skipped) for rank, verdict in said]
        given = [(rank, what or "does not match or have it") for rank, what, skipped in plans if not skipped]
        first, plan = given[0]
        for rank, other in given[1:]:
            if other != plan:
                raise ValueError(
                    f"ranks differ on layer {name!r} (rank {first}: {plan}; rank {rank}: {other}); "
                    "give every rank the same model, configuration and WOQ_TRITON_IMPL"
                )
