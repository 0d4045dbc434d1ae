"""What DeepSpeed's loading from checkpoint files leaves to be done, seen as it registers parameters.

DeepSpeed fills a model on the meta device file by file, and puts each value in place as a new Parameter,
which torch announces. Three things are mended on the way: norms and biases are views of the file, which
stays mapped as long as they live; the head is cloned before it is cut, while the original is still held;
and a parameter whose module the loader does not know gets no value at all, silently.
"""

from typing import Any

import torch
from torch import Tensor, nn

_HEADS = ("lm_head", "embed_out")
"""Last part of the names under which AutoTP finds a model's head."""


class CheckpointLoading:
    """Watches the parameters of a model that DeepSpeed loads.

    Args:
        root: The model, with parameters on the meta device.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._empty: dict[tuple[int, str], str] = {}
        self._filled: set[tuple[int, str]] = set()
        self._heads: set[int] = set()
        for path, module in root.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    self._empty[id(module), name] = f"{path}.{name}".removeprefix(".")
            if path.rpartition(".")[2] in _HEADS and isinstance(module, nn.Linear):
                self._heads.add(id(module))

    def registered(self, owner: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """What to register in a parameter's place, or None to leave it.

        Raises:
            ValueError: The head gets the weight of a quantized embedding, for want of its own.
        """
        place = id(owner), name
        if place not in self._empty:
            return None
        self._filled.add(place)
        if parameter.dim() < 2:
            return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        if name != "weight" or id(owner) not in self._heads:
            return None
        if not parameter.is_floating_point():
            raise ValueError(
                "the checkpoint has no weight for the head, which the model's config does not tie to the "
                "embedding; set tie_word_embeddings=True, or use quantize_model on the finished engine"
            )
        before = owner._parameters.get(name)
        if isinstance(before, _HeadWeight) and before.asked_for_clone:
            # It is being sharded now. DeepSpeed goes on to hold the parameter from before; not its memory.
            before.data = torch.empty(0, dtype=before.dtype, device=before.device)
            return None
        return _HeadWeight(parameter.data, requires_grad=parameter.requires_grad)

    def finish(self) -> None:
        """Make parameters that were set aside ordinary ones again, and look whether all were loaded.

        Raises:
            ValueError: DeepSpeed gave some parameter no value.
        """
        present = set()
        for module in self._root.modules():
            present.add(id(module))
            weight = module._parameters.get("weight")
            if isinstance(weight, _HeadWeight):
                module.weight = nn.Parameter(weight.data, requires_grad=False)
        left = [
            path for place, path in self._empty.items() if place not in self._filled and place[0] in present
        ]
        if left:
            raise ValueError(
                f"DeepSpeed's checkpoint loading gave no value to {len(left)} parameters, such as "
                f"{left[0]!r}: it does not know their modules, or the files lack them; load the model into "
                "memory (from_pretrained) and give DeepSpeed that"
            )


class _HeadWeight(nn.Parameter):
    """The weight of a head that waits to be sharded, of which no copy is made first.

    AutoTP clones a head before it cuts it, so that an embedding with the same weight stays whole, and
    keeps the original until it is done. But a shard is a copy, and cutting it writes to no weight.
    """

    asked_for_clone = False

    def clone(self, *args: Any, **kwargs: Any) -> Tensor:
        """The weight itself."""
        self.asked_for_clone = True
        return self
