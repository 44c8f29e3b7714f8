"""What a forward pass saves for its backward pass, kept where it can be counted, and freed piece by piece."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from tplab.torch.private import SAVED, storage_id, version_of
from tplab.torch.watching.memory import hold

_fields: dict[type, tuple[str, ...]] = {}


class Saved:
    """The tensors that the nodes of one graph have saved. The graph holds numbers, and this object the tensors.

    Autograd frees what a node has saved once the node has run, or frees nothing (`retain_graph`). Between I and W some
    of it is needed and some is not. So the tensors are kept here, and `keep_only` frees the rest.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, int, object]] = {}  # and the version each one had, and its token
        self._num_saved = 0
        self._read: set[int] | None = None

    def hooks(self) -> saved_tensors_hooks:
        """Within this, what autograd saves is kept here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def tensors(self) -> list[Tensor]:
        return [x for x, *_ in self._tensors.values()]

    def keep_only(self, nodes: Iterable[Node]) -> None:
        """Free everything except what these nodes have saved."""
        self._read = set()
        for node in nodes:
            read_saved(node)
        self._tensors = {key: kept for key, kept in self._tensors.items() if key in self._read}
        self._read = None

    def clear(self) -> None:
        self._tensors.clear()

    def _pack(self, x: Tensor) -> int:
        key = self._num_saved
        self._num_saved = key + 1
        kept = x.detach()  # the graph would keep itself alive through its own output
        self._tensors[key] = kept, version_of(x), hold(x)
        return key

    def _unpack(self, key: int) -> Tensor:
        if self._read is not None:
            self._read.add(key)
        x, version, _ = self._tensors[key]
        if version_of(x) != version:
            raise RuntimeError(
                f"a tensor {list(x.shape)} that the backward pass needs was written to since the forward pass: it is "
                f"at version {version_of(x)}, and was saved at version {version}; compute out of place"
            )
        return x


def read_saved(node: Node) -> None:
    """Read everything that a node has saved: what is read goes through the hooks."""
    kind = type(node)
    fields = _fields.get(kind)
    if fields is None:
        names = tuple(name for name in dir(node) if name.startswith(SAVED))
        fields = _fields[kind] = names or (("saved_tensors",) if hasattr(node, "saved_tensors") else ())
    for name in fields:
        getattr(node, name)


def bytes_of(tensors: Iterable[Tensor], others: Iterable[Tensor] = ()) -> int:
    """The bytes of memory that these tensors occupy, each piece once, without the memory that `others` occupy."""
    apart = {storage_id(x.untyped_storage()) for x in others}
    storages = {key: storage for x in tensors if (key := storage_id(storage := x.untyped_storage())) not in apart}
    return sum(storage.nbytes() for storage in storages.values())
